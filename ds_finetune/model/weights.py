"""Weights into the fragments that live on this rank: streamed from safetensors, or drawn afresh; every tensor accounted for."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.errors import ModelError
from ds_finetune.model.build import Fragment, Where, whole
from ds_finetune.model.cuts import WHOLE, Cut, Window, cut_dim
from ds_finetune.model.families import Family
from ds_finetune.model.names import Piece, differences, hub_pieces

_SHOWN = 10
_DIGESTED = 256
_FP8 = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class LoadReport:
    """What was loaded and which checkpoint keys the family declares not to be."""

    num_tensors: int
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class _Target:
    """A tensor of the model: its name, its fragment, and the checkpoint tensors it is made of."""

    name: str
    fragment: Fragment
    pieces: tuple[Piece, ...]


def load_weights(  # noqa: PLR0913
    model: PreTrainedModel, folder: Path, *, family: Family, where: Where = whole, cut: Cut = WHOLE, skeleton: PreTrainedModel | None = None
) -> LoadReport:
    """Copy the safetensors of `folder` into the fragments of `model` that `where` names, a bounded piece at a time.

    A model cut over tensor parallel ranks takes its part `cut` of each tensor, of which nothing else is read; for a pipeline
    stage `skeleton` is the whole model, without memory, that the checkpoint has to fit.

    Keys and shapes are compared from the headers alone before anything is written; ModelError lists what is missing,
    unexpected or of another shape. Values are cast to the dtype of their target; a NaN or infinity is a ModelError.
    """
    with HubFiles(folder) as checkpoint:
        targets = list(_targets(model, family, where, cut))
        wanted = _wanted(model, family, where, cut) if skeleton is None else _wanted(skeleton, family, whole, WHOLE)
        skipped = _account(checkpoint, wanted, model, family)
        for target in targets:
            _fill(checkpoint, target, cut)
    return LoadReport(num_tensors=sum(len(t.pieces) for t in targets), skipped=tuple(skipped))


@contextmanager
def open_weights(model: PreTrainedModel, folder: Path, *, family: Family) -> Iterator["HubFiles"]:
    """The safetensors of `folder` for reading; ModelError as in `load_weights` where they do not fit `model`, which may be without memory."""
    with HubFiles(folder) as files:
        _account(files, _wanted(model, family, whole, WHOLE), model, family)
        yield files


def weights_digest(folder: Path) -> str:
    """Sixteen hexadecimal digits that tell the weights of `folder` from those of others: of the first rows of tensors all over the model.

    A copy in fp32 of a bf16 model has the same ones.
    """
    digest = hashlib.sha256()
    with HubFiles(folder) as checkpoint:
        keys = sorted(checkpoint.file_of)
        for key in keys[:: -(-len(keys) // _DIGESTED)]:
            found = checkpoint.slice_of(key)
            rows = found[:1] if found.get_shape() else found[...]
            digest.update(key.encode() + rows.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def initialise_weights(model: PreTrainedModel, *, seed: int, where: Where = whole, cut: Cut = WHOLE) -> None:
    """Draw fresh weights by the model's own rule (`_init_weights`), the same for any world size, ZeRO stage and cut.

    One module at a time is materialised in fp32 on the CPU, seeded from (seed, module name), and its fragment kept.
    """
    tied = {name for name in (model.all_tied_weights_keys or {}) if model.config.tie_word_embeddings}
    for name, module in model.named_modules():
        own = [(leaf, p) for leaf, p in module.named_parameters(recurse=False) if f"{name}.{leaf}".lstrip(".") not in tied]
        if own:
            windows = {leaf: cut.window(f"{name}.{leaf}", where(param).shape) for leaf, param in own}
            _initialise_module(model, module, own, seed_of(seed, name), where, windows)


def clear_weights(model: PreTrainedModel, *, where: Where = whole) -> None:
    """Set every parameter to zero, for values that come later; unset memory may hold NaN."""
    for param in model.parameters():
        with where(param).opened() as flat:
            flat.zero_()


def seed_of(seed: int, name: str) -> int:
    """The seed of what is drawn for `name` in a run with `seed`."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def _initialise_module(  # noqa: PLR0913
    model: PreTrainedModel, module: nn.Module, own: list[tuple[str, nn.Parameter]], seed: int, where: Where, windows: Mapping[str, Window]
) -> None:
    drawn = {leaf: torch.zeros(windows[leaf].shape, dtype=torch.float32) for leaf, _ in own}
    kept = dict(module._parameters)
    buffers = dict(module._buffers)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for leaf, tensor in drawn.items():
            module._parameters[leaf] = nn.Parameter(tensor)
        module._buffers.update({leaf: b.clone() for leaf, b in buffers.items() if b is not None})
        model._init_weights(module)
        values = {leaf: param.data for leaf, param in module._parameters.items() if leaf in drawn and param is not None}
    module._parameters.update(kept)
    module._buffers.update(buffers)
    for leaf, param in own:
        fragment = where(param)
        if fragment.end > fragment.start:
            with fragment.opened() as flat:
                flat[: fragment.end - fragment.start].copy_(windows[leaf].of(values[leaf])[fragment.start : fragment.end])


def _wanted(model: PreTrainedModel, family: Family, where: Where, cut: Cut) -> dict[str, tuple[int, ...]]:
    """Key and shape of every checkpoint tensor that the whole model is made of."""
    windows = {target.name: cut.window(target.name, target.fragment.shape) for target in _targets(model, family, where, cut)}
    return {piece.key: piece.shape for name, window in windows.items() for piece in hub_pieces(name, window.shape, family)}


def _targets(model: PreTrainedModel, family: Family, where: Where, cut: Cut) -> Iterator[_Target]:
    for name, param in model.named_parameters():
        fragment = where(param)
        window = cut.window(name, fragment.shape)
        first = window.origin[0] if window.is_shared_out else 0
        yield _Target(name, fragment, hub_pieces(name, fragment.shape, family, first_expert=first))
    for module_name, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                name = f"{module_name}.{leaf}".lstrip(".")
                yield _Target(name, whole(buffer), hub_pieces(name, tuple(buffer.shape), family))


class HubFiles:
    """The safetensors files of a folder as one name space, opened lazily and read by slices."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.file_of = self._read_index()

    def __enter__(self) -> "HubFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def slice_of(self, key: str) -> Any:  # noqa: ANN401 - safetensors' PySafeSlice
        """The tensor `key`, of which nothing is read until it is indexed."""
        return self._open(self.file_of[key]).get_slice(key)

    def _open(self, file: str) -> Any:  # noqa: ANN401
        if file not in self._files:
            try:
                self._files[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
            except SafetensorError as damaged:
                raise ModelError(f"{self.folder / file} cannot be read: {damaged}", hint="the file is damaged; get it again") from damaged
        return self._files[file]

    def _read_index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            outside = sorted({file for file in weight_map.values() if Path(file).name != file})
            if outside:
                raise ModelError(f"{index} names `{outside[0]}`, which is not a file of the folder", hint="the index is damaged; get it again")
            absent = sorted({file for file in weight_map.values() if not (self.folder / file).is_file()})
            if absent:
                raise ModelError(
                    f"{index} names {len(absent)} files that are not there: {', '.join(absent[:_SHOWN])}", hint="download the model again"
                )
            return weight_map
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"model folder `{self.folder}` has no safetensors weights",
                hint="give a folder with weights, or set model.weights: random to build from config.json alone",
            )
        return {key: file.name for file in files for key in self._open(file.name).keys()}  # noqa: SIM118 - not a dict


def _account(checkpoint: HubFiles, wanted: Mapping[str, tuple[int, ...]], model: PreTrainedModel, family: Family) -> list[str]:
    skipped = [key for key in sorted(checkpoint.file_of.keys() - wanted.keys()) if _is_declared(key, model, family)]
    found = {key: tuple(checkpoint.slice_of(key).get_shape()) for key in checkpoint.file_of.keys() - set(skipped)}
    fp8 = [key for key in sorted(wanted.keys() & found.keys()) if checkpoint.slice_of(key).get_dtype() in _FP8]
    if fp8:
        raise ModelError(f"{checkpoint.folder} holds {len(fp8)} FP8 tensors, e.g. `{fp8[0]}`", hint="give a bf16 copy of the checkpoint")
    wrong = differences(wanted, found)
    if wrong:
        raise ModelError(
            f"{checkpoint.folder} does not fit {type(model).__name__}: {wrong}",
            hint="the checkpoint is incomplete or of another model; nothing is trained from weights that were not loaded",
        )
    return skipped


def _is_declared(key: str, model: PreTrainedModel, family: Family) -> bool:
    """Whether a checkpoint key may be left over: declared by the family, a tied head, or a layer past the last one."""
    if any(re.search(pattern, key) for pattern in family.may_be_unexpected):
        return True
    if model.config.tie_word_embeddings and key in (model.all_tied_weights_keys or {}):
        return True
    layer = re.match(r"^model\.layers\.(\d+)\.", key)
    return bool(family.drops_layers_beyond and layer and int(layer[1]) >= model.config.num_hidden_layers)


def _fill(checkpoint: HubFiles, target: _Target, cut: Cut) -> None:
    with target.fragment.opened() as flat:
        for piece in target.pieces:
            _copy_piece(checkpoint, target.fragment, flat, piece, cut)


def _copy_piece(checkpoint: HubFiles, fragment: Fragment, flat: torch.Tensor, piece: Piece, cut: Cut) -> None:
    """Copy the part of `piece` that lies in `fragment` into its elements `flat`, reading only what it needs."""
    begin, width = piece.first_element(fragment.shape), max(1, math.prod(piece.shape[1:]))
    first = max(0, (fragment.start - begin) // width)
    last = min(piece.shape[0] if piece.shape else 1, -(-(fragment.start + fragment.numel - begin) // width))
    if first >= last:
        return
    values = _read(checkpoint.slice_of(piece.key), piece, first, last, cut)
    if not bool(torch.isfinite(values).all()):
        raise ModelError(f"tensor `{piece.key}` of {checkpoint.folder} holds NaN or infinity", hint="the checkpoint is damaged; download it again")
    flat_values = values.reshape(-1)
    offset = begin + first * width - fragment.start
    source_from, target_from = max(0, -offset), max(0, offset)
    count = min(flat_values.numel() - source_from, fragment.numel - target_from)
    flat[target_from : target_from + count].copy_(flat_values[source_from : source_from + count])


def _read(source: Any, piece: Piece, first: int, last: int, cut: Cut) -> torch.Tensor:  # noqa: ANN401 - safetensors' PySafeSlice
    """Rows `first` to `last` of a piece, of which `source` is the whole and this rank has a part."""
    if not piece.shape:
        return source[...]  # type: ignore[no-any-return]
    dim = cut_dim(piece.key) if cut.parts > 1 else None
    row = cut.place * piece.shape[0] if dim == 0 else 0
    if dim == 1:
        return source[first:last, cut.place * piece.shape[1] : (cut.place + 1) * piece.shape[1]]  # type: ignore[no-any-return]
    return source[row + first : row + last]  # type: ignore[no-any-return]

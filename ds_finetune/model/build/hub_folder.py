"""Checks a model folder, and reads its safetensors files.

The folder may come from anywhere, so checks come first: its files must not make this program hang or run out of memory.
Tensors are read by name in pieces of bounded size, and FP8, MXFP4 and FP4 weights are dequantised.

Files are read, not memory-mapped as by safetensors' own reader (0.6, `safe_open`). Mapped pages count as memory of this
process, and a signal would kill it if another process shortened the file.
"""

import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from ds_finetune.errors import ModelError
from ds_finetune.families.family import DEEPSEEK_V4_RENAMES, Family
from ds_finetune.families.table import family_of
from ds_finetune.families.text_part import is_composite, text_name, text_tree
from ds_finetune.model.quantised.fp8 import BLOCK, FP8, SCALE, SCALE_DTYPES, dequantise, scale_shape
from ds_finetune.model.quantised.mxfp4 import (
    BLOCKS,
    PACKED,
    SCALES,
    Fp4Matrix,
    Mxfp4Experts,
    find_experts,
    find_matrices,
)
from ds_finetune.model.weights.names import canonical_name, differences, hub_pieces, is_table, qkv_pieces, renamed
from ds_finetune.model.weights.safetensors_file import (
    Header,
    Scratch,
    Shape,
    StoredTensor,
    TensorFile,
    header_bytes,
    read_header,
)
from ds_finetune.plan.config_json import check_sizes

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.codes", "additional_chat_templates/*.jinja")
"""Patterns of a model folder's files that checkpoints and exports copy, or that transformers reads and writes again."""
_INDEX = ".index.json"
"""Suffix of the index of a model's weights, a file that lists all weight files."""


def check_folder(folder: Path) -> None:
    """ModelError if a model folder is dangerous or ambiguous. It must have no pipe, socket or device, no link out of
    the folder that would be copied, no implausible size in headers or config.json, and only one set of weights.

    Reading a pipe would hang. A linked chat template, vocabulary or configuration would copy a private file of this
    machine into exports. Weights and their index may be links.
    """
    special = [
        entry.name
        for entry in sorted(folder.iterdir())
        if entry.exists() and not entry.is_file() and not entry.is_dir()
    ]
    if special:
        raise ModelError(
            f"`{folder}` holds {', '.join(special[:_SHOWN])}, which is no regular file but a pipe, socket or device",
            hint="it may be harmful; remove it, or download the model again",
        )
    for file in (file for pattern in _COPIED for file in sorted(folder.glob(pattern))):
        if not file.name.endswith(_INDEX):
            check_inside(file, folder)
    for file in (file for file in sorted(folder.glob("*.safetensors")) if file.is_file()):
        try:
            header_bytes(file)
        except ValueError as too_long:
            raise ModelError(
                f"{file} cannot be read: {too_long}", hint="the file is damaged or harmful; download it again"
            ) from too_long
    index = folder / INDEX
    if (folder / SINGLE).is_file() and index.is_file() and f'"{SINGLE}"'.encode() not in index.read_bytes():
        raise ModelError(
            f"{folder} has weights twice: {SINGLE}, which transformers reads, and the shards listed in {INDEX}",
            hint="remove one of the two, which may be different models",
        )
    if (folder / "config.json").is_file():
        check_sizes(folder / "config.json")


def check_inside(file: Path, folder: Path | None = None) -> Path:
    """Return the path of `file` with links resolved. ModelError if it is not in `folder` (by default the file's own
    folder) or in the hub cache's blobs of the same model.
    """
    real, target = (folder or file.parent).resolve(), file.resolve()
    blobs = [above.parent / "blobs" for above in real.parents if above.name == "snapshots"]
    if not any(target.is_relative_to(folder_path) for folder_path in (real, *blobs)):
        raise ModelError(
            f"{file} is a link to {target}, outside its folder",
            hint="the link may be harmful; if it is not, replace it by the file itself, e.g. with `cp -L`",
        )
    return target


def copy_model_file(file: Path, out: Path) -> None:
    """Copy a file of a model folder or checkpoint to the path `out`.

    ModelError if the file is a link out of its folder, because it may lead to a private file of this machine.
    """
    shutil.copyfile(check_inside(file), out, follow_symlinks=False)


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_WEIGHTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, FP8)
_SHOWN = 10
_COMPARED_NUMEL = 2**20
"""When two tensors are compared, this many elements of each are read at a time."""
_OF_TRANSFORMERS = "model.hc_head.hc_fn"
"""Name of a tensor that only a DeepSeek-V4 model saved by transformers has. Published tensors have other names."""


class HubFolder:
    """Tensors of a folder with published weights, by their names in the model. `shapes` has their shapes in the model,
    without the scales of quantised weights. Of a multimodal model only the text part's tensors are read.

    `rename` maps stored names to names in the model. ModelError if the folder has no safetensors, if a file is missing,
    incomplete or outside the folder, or if a quantised weight or its scale is missing.
    """

    others: Mapping[str, StoredTensor]
    """Tensors of a multimodal model that are not in the text part, by published name."""
    published: dict[str, tuple[str, int]]
    """For each tensor of a multimodal model's text part, by its name in that part: name of the published tensor that
    contains it, and index of its first element in the published tensor.
    """
    fused: dict[str, Shape]
    """Published tensors that join a layer's experts, or its queries, keys and values; `shapes` has their parts."""

    def __init__(self, folder: Path, *, rename: Callable[[str], str] | None = None) -> None:
        self.folder = folder
        self._scratch = Scratch()
        stored = _read_tensors(folder)
        # In DeepSeek-V4, scales of a quantised `X.weight` are called `X.scale`. They are renamed as in DeepSeek-V3.
        quantised = [key for key, tensor in stored.items() if tensor.dtype in (FP8, PACKED)]
        usual_names = {f"{key.removesuffix('.weight')}.scale": f"{key}{SCALE}" for key in quantised}
        stored = {usual_names.get(key, key): tensor for key, tensor in stored.items()}
        config = config_of(folder)
        names = {key: text_name(key) for key in stored} if is_composite(config) else {}
        self.others = {key: stored.pop(key) for key, name in names.items() if name is None}
        if names:
            stored = _renamed(stored, lambda key: names[key] or key, folder)
        if _OF_TRANSFORMERS in stored:
            stored = _renamed(stored, partial(renamed, renames=DEEPSEEK_V4_RENAMES), folder)
        family = family_of(str(text_tree(config).get("model_type")))
        published = {name: key for key, name in names.items() if name is not None}
        if family.is_generic:
            stored = _renamed(stored, partial(canonical_name, family=family), folder)
            published = {canonical_name(name, family): key for name, key in published.items()}
        stored, fused = _divided(stored, family, text_tree(config), folder)
        self.fused = {published.get(key, key): stored_shape for key, (stored_shape, _) in fused.items()}
        self.published = {name: (key, 0) for name, key in published.items() if name not in fused}
        for key, (_, firsts) in fused.items():
            self.published |= {name: (published[key], first) for name, first in firsts.items() if key in published}
        self._stored = stored if rename is None else _renamed(stored, rename, folder)
        fp8 = [key for key, stored in self._stored.items() if stored.dtype == FP8]
        _check_scales(folder, self._stored, fp8)
        self._scaled = frozenset(fp8)
        experts, matrices = find_experts(self._stored, folder), find_matrices(self._stored, folder)
        parts = {key + SCALE for key in (*fp8, *matrices)} | {key + end for key in experts for end in (BLOCKS, SCALES)}
        self._packed: Mapping[str, Mxfp4Experts | Fp4Matrix] = {**experts, **matrices}
        self.shapes: Mapping[str, Shape] = {
            **{key: stored.shape for key, stored in self._stored.items() if key not in parts},
            **{key: tensor.shape for key, tensor in self._packed.items()},
        }

    @property
    def has_fp8(self) -> bool:
        """Whether any tensor of the folder is stored in FP8 blocks."""
        return bool(self._scaled)

    def is_fp8(self, key: str) -> bool:
        """Whether the tensor `key` is stored in FP8 blocks."""
        return key in self._scaled

    def fp4(self, key: str) -> Fp4Matrix | None:
        """The packed weight and scales of tensor `key` if it is stored in FP4, else None."""
        packed = self._packed.get(key)
        return packed if isinstance(packed, Fp4Matrix) else None

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of the tensor that `read` returns: the stored dtype, or fp32 for FP8, MXFP4 and FP4."""
        return torch.float32 if self.is_quantised(key) else self._stored[key].dtype

    def is_quantised(self, key: str) -> bool:
        """Whether the tensor `key` is stored in FP8, MXFP4 or FP4."""
        return self.is_fp8(key) or key in self._packed

    def read(self, key: str, start: int, numel: int) -> torch.Tensor:
        """Read elements `start` to `start + numel` of the flattened (row-major) tensor, 1-D. The thread's next read
        overwrites the result. FP8 and FP4 are read from the file in full rows, MXFP4 in full experts.
        """
        if isinstance(packed := self._packed.get(key), Mxfp4Experts):
            return packed.read(start, numel)
        if not self.is_quantised(key):
            return self._stored[key].read(start, numel, into=self._scratch)
        width = self.shapes[key][1]
        first, last = start // width, -(-(start + numel) // width)
        return self.rows(key, first, last).view(-1)[start - first * width :][:numel]

    def rows(self, key: str, first: int, last: int, within: tuple[slice, ...] = ()) -> torch.Tensor:
        """Read rows `first` to `last` of a tensor, [rows, ...]. The same thread's next read overwrites the result.

        `within` has ranges of the other dimensions. Only elements in these ranges are dequantised and returned.
        """
        if key in self._packed:
            return self._packed[key].rows(first, last, within)
        values = self._stored[key].rows(first, last, into=self._scratch)[(slice(None), *within)]
        if not self.is_fp8(key):
            return values
        begin = within[0].start if within else 0
        return dequantise(values, self.scales(key, first, last)[:, begin // BLOCK :], row=first, column=begin)

    def full_tensor(self, key: str) -> torch.Tensor:
        """Read all of the tensor `key` into new memory."""
        rows = self.shapes[key][0] if self.shapes[key] else 1
        if key in self._packed:
            return self._packed[key].rows(0, rows)
        stored = self._stored[key]
        values = stored.read(0, math.prod(stored.shape)).view(stored.shape)
        return dequantise(values, self.scales(key, 0, rows)) if self.is_fp8(key) else values

    def scales(self, key: str, first: int, last: int) -> torch.Tensor:
        """Scales of the blocks of rows `first` to `last` of an FP8 weight: fp32 [block rows, block columns]."""
        return self._stored[key + SCALE].rows(first // BLOCK, -(-last // BLOCK)).float()

    def scale_dtype(self, key: str) -> torch.dtype:
        """Dtype in which the scales of an FP8 weight are stored."""
        return self._stored[key + SCALE].dtype

    def stored_rows(self, key: str, first: int, last: int) -> torch.Tensor:
        """Read rows `first` to `last` of an FP8 weight without dequantising them."""
        return self._stored[key].rows(first, last)

    def left_over(self, expected: Mapping[str, Shape], *, model: str, may_be: Callable[[str], bool]) -> list[str]:
        """Sorted names of the folder's additional tensors: `expected` lacks them, and `may_be` allows them.

        ModelError lists missing tensors, additional tensors that are not allowed, and wrong shapes or dtypes.
        """
        unused = [key for key in sorted(self.shapes.keys() - expected.keys()) if may_be(key)]
        wrong = differences(expected, {key: shape for key, shape in self.shapes.items() if key not in set(unused)})
        if wrong:
            raise ModelError(
                f"{self.folder} does not fit {model}: {wrong}",
                hint="the folder is incomplete or has another model; download it again, or name the right folder",
            )
        self.check_dtypes(besides=unused)
        return unused

    def check_dtypes(self, *, besides: Iterable[str] = ()) -> None:
        """ModelError if a tensor has a dtype that weights never have. Tensors named in `besides` are not checked."""
        read = self.shapes.keys() - self._packed.keys() - set(besides)
        dtypes = {key: self._stored[key].dtype for key in read}
        others = [
            f"`{key}` is {kind}"
            for key, kind in dtypes.items()
            if kind not in ((torch.int32, torch.int64) if is_table(key) else _WEIGHTS)
        ]
        if others:
            raise ModelError(
                f"{self.folder} has {len(others)} tensors of dtypes that are not for weights: "
                f"{', '.join(others[:_SHOWN])}",
                hint="use a copy of the model with weights in bf16, and tables from token ids to experts in int64",
            )

    def is_same(self, key: str, other: str) -> bool:
        """Whether two tensors have equal shape and values. A few rows are read at a time."""
        shape = self.shapes[key]
        if shape != self.shapes[other]:
            return False
        step = max(1, _COMPARED_NUMEL // max(1, math.prod(shape[1:])))
        ranges = ((first, min(first + step, shape[0])) for first in range(0, shape[0], step))
        return all(torch.equal(self.rows(key, *some).clone(), self.rows(other, *some)) for some in ranges)


def config_of(folder: Path) -> Mapping[str, Any]:
    """The parsed config.json of `folder`; {} if it cannot be read, which other checks report."""
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def check_weight_files(folder: Path) -> None:
    """ModelError if a safetensors file that transformers would load is missing or truncated, or if the index has no
    `metadata`, which transformers 5.23 requires (utils/hub.py:969).
    """
    index, file = folder / INDEX, folder / SINGLE
    if index.is_file():
        _read_indexed(folder)
        if '"metadata"' not in index.read_text(encoding="utf-8"):
            raise ModelError(f"{index} has no `metadata`, which transformers reads", hint='add `"metadata": {}` to it')
    elif file.is_file():
        _read_header(file)


def has_weights(folder: Path) -> bool:
    """Whether `folder` has safetensors files, or the index that lists them."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def _renamed(stored: Mapping[str, StoredTensor], rename: Callable[[str], str], folder: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for key, tensor in stored.items():
        name = rename(key)
        if name in tensors:
            same_name = sorted(other for other in stored if rename(other) == name)
            raise ModelError(
                f"{folder} has two tensors, `{same_name[0]}` and `{same_name[1]}`, for `{name}` of the model",
                hint="remove one of the two tensors",
            )
        tensors[name] = tensor
    return tensors


def _divided(
    stored: Mapping[str, StoredTensor], family: Family, config: Mapping[str, Any], folder: Path
) -> tuple[dict[str, StoredTensor], dict[str, tuple[Shape, dict[str, int]]]]:
    """Split tensors with all experts of a layer, as in Qwen3.5, into a tensor for each expert, tensors with queries,
    keys and values, as in Sarvam 30B, into three, and tensors with gate and up projection into two.

    The second result has, for each split tensor, its shape, and the index at which each of its parts (by name) begins.
    ModelError if the folder has the same weights in two tensors.
    """
    divided, fused = dict(stored), {}
    for key, tensor in stored.items():
        # Only a matrix with an even number of rows can be split in two halves. If another tensor should have been
        # split, the later comparison with the model's shapes reports it.
        is_even = len(tensor.shape) > 1 and min(tensor.shape) > 0 and tensor.shape[-2] % 2 == 0
        is_joined = ".gate_up_proj." in key or (".experts." in key and len(tensor.shape) > 2)
        pieces = hub_pieces(key, tensor.shape, family) if is_even and is_joined else ()
        if tensor.dtype in _WEIGHTS and tensor.dtype != FP8:
            pieces = pieces or qkv_pieces(key, tensor.shape, family, config)
        if not pieces or not pieces[0].index:
            continue
        if twice := [piece.key for piece in pieces if piece.key in stored]:
            raise ModelError(
                f"{folder} has the same weights in two tensors, `{key}` and `{twice[0]}`",
                hint="remove one of the two tensors",
            )
        firsts = {piece.key: piece.first_element(tensor.shape) for piece in pieces}
        begins = {name: tensor.begin + first * tensor.dtype.itemsize for name, first in firsts.items()}
        divided |= {piece.key: replace(tensor, shape=piece.shape, begin=begins[piece.key]) for piece in pieces}
        fused[key] = (divided.pop(key).shape, firsts)
    return divided, fused


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / INDEX).is_file():
        return _read_indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"model folder `{folder}` has no safetensors weights",
            hint=bin_conversion(folder)
            or "give a folder with weights, or set model.weights: random to build from only config.json",
        )
    return _merge_files(files, {})


def bin_conversion(folder: Path) -> str:
    """Hint with a command that converts a folder's pytorch_model*.bin weights to safetensors; empty without such files.

    These files are pickles. The command makes transformers read them with `weights_only`, so that no code in them runs.
    """
    if not any(folder.glob("pytorch_model*.bin")):
        return ""
    names = config_of(folder).get("architectures")
    # Users paste this command into a shell, so nothing of config.json enters it but the name of a transformers class.
    class_name = names[0] if isinstance(names, list) and names else None
    kind = class_name if class_name in dir(transformers) else "AutoModelForCausalLM"
    code = (
        f"from transformers import {kind} as M; p = {str(folder)!r}; "
        "M.from_pretrained(p, dtype='auto', weights_only=True).save_pretrained(p)"
    )
    return f"convert its pytorch_model.bin: python -c {shlex.quote(code)}"


def _read_indexed(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    try:
        weight_map = {
            str(key): str(file) for key, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise ModelError(
            f"{index} is not an index of safetensors: {broken!r}", hint="download the file again"
        ) from broken
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if name != Path(name).name or name == ".."]
    if outside:
        raise ModelError(
            f"{index} names files outside its folder: {', '.join(outside[:_SHOWN])}",
            hint="the index may be harmful; download the model again",
        )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelError(
            f"{index} names {len(absent)} files that are not there: {', '.join(absent[:_SHOWN])}",
            hint="download the model again",
        )
    tensors = _merge_files([folder / name for name in names], weight_map)
    missing_tensors = [
        f"`{key}` in {file}"
        for key, file in sorted(weight_map.items())
        if key not in tensors or tensors[key].file.path.name != file
    ]
    if missing_tensors:
        raise ModelError(
            f"{index} names {len(missing_tensors)} tensors that are not there: {', '.join(missing_tensors[:_SHOWN])}",
            hint="download the model again",
        )
    return tensors


def _merge_files(files: Iterable[Path], weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Tensors of all weight `files`. If a name is in several files, the index's `weight_map` decides."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        file = TensorFile(path)
        for key, entry in _read_header(path).tensors.items():
            if key in tensors and key not in weight_map:
                raise ModelError(
                    f"the tensor `{key}` is in both {tensors[key].file.path} and {path}",
                    hint=f"remove one of the files, or add {INDEX}",
                )
            if weight_map.get(key, path.name) == path.name:
                tensors[key] = StoredTensor(file, entry.dtype, entry.shape, entry.begin)
    return tensors


def _read_header(path: Path) -> Header:
    try:
        return read_header(path)
    except (OSError, ValueError) as broken:
        raise ModelError(
            f"{path} is not a complete safetensors file: {broken}", hint="download the file again"
        ) from broken


def _check_scales(folder: Path, stored: Mapping[str, StoredTensor], fp8: Iterable[str]) -> None:
    weights = set(fp8)
    without_scale = sorted(key for key in weights if key + SCALE not in stored)
    if without_scale:
        raise ModelError(
            f"{folder} holds {len(without_scale)} FP8 weights without `{SCALE}`: {', '.join(without_scale[:_SHOWN])}",
            hint="use a bf16 copy of the model",
        )
    packed = {key for key, tensor in stored.items() if tensor.dtype == PACKED}
    unused_scales = sorted(
        key for key in stored if key.endswith(SCALE) and key.removesuffix(SCALE) not in weights | packed
    )
    if unused_scales:
        raise ModelError(
            f"{folder} holds {len(unused_scales)} scales without an FP8 weight: {', '.join(unused_scales[:_SHOWN])}",
            hint="use a bf16 copy of the model",
        )
    for key in sorted(weights):
        weight, scale = stored[key], stored[key + SCALE]
        if len(weight.shape) != 2 or scale.shape != scale_shape(weight.shape) or scale.dtype not in SCALE_DTYPES:
            raise ModelError(
                f"{folder}: the FP8 weight `{key}` {weight.shape} has scales {scale.shape} of {scale.dtype}, not "
                f"{scale_shape(weight.shape)} of {' or '.join(map(str, SCALE_DTYPES))}",
                hint=f"only blocks of {BLOCK} x {BLOCK} are supported; use a bf16 copy of the model",
            )

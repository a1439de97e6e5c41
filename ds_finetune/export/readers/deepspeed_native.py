"""Reads checkpoints in DeepSpeed's own format (`engine.save_checkpoint`), ZeRO stages 0 to 3, without DeepSpeed.

The format is described in DeepSpeed 0.19.8: runtime/engine.py:4319-4361 (file names), 5017-5038 (model states),
runtime/zero/stage_1_and_2.py:3358-3403 and stage3.py:3431-3447 (optimizer states), utils/zero_to_fp32.py (how the
ranks' partitions are joined).
"""

import math
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ds_finetune.errors import ExportError
from ds_finetune.export.source import TensorSource
from ds_finetune.model.build.hub_folder import check_folder
from ds_finetune.model.weights.safetensors_file import Scratch, StoredTensor, TensorFile


class Inert:
    """Placeholder for a pickled object whose class is not imported. Its state is ignored."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class InertInt(int):
    """Placeholder for a pickled member of an integer enumeration, e.g. `ZeroStageEnum`."""


def _load_values(path: Path) -> dict[str, Any]:
    """Load the dictionary that torch.save wrote to `path`, with tensors on the meta device; `_States.stored` locates
    their data. No pickled code runs. ExportError if the file names a class that neither torch nor `_STAND_INS` allows.
    """
    try:
        with safe_globals(list(_STAND_INS)):
            unknown = sorted(get_unsafe_globals_in_checkpoint(str(path)))
            if unknown:
                raise ExportError(
                    f"{path} holds objects of {len(unknown)} unknown classes: {', '.join(unknown)}",
                    hint="it was not loaded, since such objects can run code: use a checkpoint that DeepSpeed wrote",
                )
            tree = torch.load(path, map_location="meta", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as broken:
        reason = str(broken).splitlines()[0]
        raise ExportError(
            f"{path} cannot be read: {reason}",
            hint="the file is damaged or was not written by torch.save; use an older checkpoint",
        ) from broken
    if not isinstance(tree, dict):
        raise ExportError(
            f"{path} holds a {type(tree).__name__}, not a dictionary", hint="name a folder that DeepSpeed wrote"
        )
    return tree


Vector = Sequence[StoredTensor]
"""A flat vector that is stored as 1-D tensors in files, all of one dtype."""


def _numel(vector: Vector) -> int:
    return sum(stored.shape[0] for stored in vector)


@dataclass(frozen=True)
class SplitTensor:
    """A tensor stored in slices of `slice_numel` elements, e.g. one per rank. Slice i begins at element `offset` of the
    flat vector `vectors[i]`. The last slice may end with padding.
    """

    shape: tuple[int, ...]
    vectors: Sequence[Vector]
    offset: int
    slice_numel: int

    def read(self, start: int, numel: int, *, into: Scratch) -> torch.Tensor:
        """Read elements `start` to `start + numel` of the flattened tensor, 1-D, in the stored dtype. A single piece is
        read into the buffer `into`.
        """
        pieces, end = [], start + numel
        while start < end:
            index, skipped = divmod(start, self.slice_numel)
            count, first = min(self.slice_numel - skipped, end - start), self.offset + skipped
            start += count
            for stored in self.vectors[index]:
                begin, stop = max(first, 0), min(first + count, stored.shape[0])
                pieces += [(stored, begin, stop - begin)] if begin < stop else []
                first -= stored.shape[0]
        if len(pieces) <= 1:
            stored, *piece = pieces[0] if pieces else (self.vectors[0][0], 0, 0)
            return stored.read(*piece, into=into)
        return torch.cat([stored.read(*piece) for stored, *piece in pieces])


_STAND_INS = (
    (Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (InertInt, "deepspeed.runtime.zero.config.ZeroStageEnum"),
)
"""DeepSpeed classes that its checkpoint files name, each with the placeholder that replaces it."""
_RANK_FILE = re.compile(
    r"(?P<bf16>bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?(?P<kind>model|optim)_states\.pt"
)
_MODEL_FILE = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")
_ELSEWHERE = "load it in the program that wrote it and save a Hugging Face folder there (engine.save_16bit_model)"
_UNSUPPORTED_LAYOUTS = (
    (re.compile(r"(layer_\d+_)?expert_\d+_.*|expp_rank_\d+_.*"), "experts are spread over ranks (expert parallelism)"),
    (re.compile(r"layer_\d+-.*model_states\.pt"), "layers are spread over ranks (pipeline parallelism)"),
    (
        re.compile(r"(.*_)?mp_rank_0*[1-9]\d*_.*_states\.pt"),
        "tensors are spread over ranks (tensor or pipeline parallelism)",
    ),
    (re.compile(r"offloaded_tensors"), "the optimizer was offloaded to NVMe, and its values are in .swp files"),
    (re.compile(r"zero"), "it is a universal checkpoint"),
)
"""Patterns of file names by which unsupported checkpoint layouts are recognised, each with its meaning."""
_MODEL_KEYS, _OPTIM_KEYS = ("module", "buffer_names", "dp_world_size"), ("optimizer_state_dict",)
_AUTOEP_KEYS = ("ds_autoep_layers", "autoep_layers")
_PREFIXES = ("module.", "lm.")


def is_deepspeed_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a checkpoint written by DeepSpeed: it has a file `latest`, or *_states.pt files."""
    return (folder / "latest").is_file() or any(folder.glob("*_states.pt"))


def read_deepspeed_checkpoint(folder: Path) -> TensorSource:
    """Read the weights and persistent buffers of a DeepSpeed checkpoint. `folder` is a step folder, or has a file
    `latest` that names one. Weights are the optimizer's fp32 master weights if there are any, else the stored weights.
    ExportError if a file is missing or the layout is not supported.
    """
    step = _step_folder(folder)
    check_folder(step)
    for path in sorted(step.iterdir()):
        for pattern, meaning in _UNSUPPORTED_LAYOUTS:
            if pattern.fullmatch(path.name):
                raise ExportError(f"{step} has `{path.name}`, which is not supported: {meaning}", hint=_ELSEWHERE)
    model = _read_model_states(step)
    optim = _read_optim_states(step, model)
    stored = dict[str, SplitTensor]()
    if optim:
        zero = _zero(optim[0])
        if "ds_zero_partition_groups" in zero or any(model[0].values.get(key) for key in _AUTOEP_KEYS):
            raise ExportError(f"the checkpoint {step} is not supported: {_UNSUPPORTED_LAYOUTS[0][1]}", hint=_ELSEWHERE)
        trained_weights = _stage_3_weights if "fp32_flat_groups" in zero else _stage_1_and_2_weights
        stored |= trained_weights(step, model[0].values["param_shapes"], optim)
    stored |= _frozen_weights(model)
    module = model[0].values["module"]
    stored |= {name: _full(model[0], module[name]) for name in model[0].values["buffer_names"]}
    for alias, owner in (model[0].values.get("shared_params") or {}).items():
        if owner in stored:
            stored[alias] = stored[owner]
    prefix, scratch = "", Scratch()
    while more := next((p for p in _PREFIXES if stored and all(name.startswith(prefix + p) for name in stored)), ""):
        prefix += more
    tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    buffers = frozenset(name.removeprefix(prefix) for name in model[0].values["buffer_names"])
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return TensorSource(shapes, buffers, lambda name, *part: tensors[name].read(*part, into=scratch))


@dataclass(frozen=True)
class _States:
    file: TensorFile
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path, *, keys: Collection[str]) -> "_States":
        values = _load_values(path)
        absent = sorted(set(keys) - values.keys())
        if absent:
            raise ExportError(
                f"{path} has no {', '.join(absent)}; it has {', '.join(map(str, values))}",
                hint="name a folder that DeepSpeed wrote",
            )
        return cls(TensorFile(path), values)

    def stored(self, tensor: torch.Tensor) -> StoredTensor:
        """Find the data of `tensor`, which `_load_values` loaded, as a 1-D tensor in its file. ExportError if it is not
        contiguous.

        torch 2.13 records in the storage of a meta tensor where in the file its data begin (serialization.py:2098).
        """
        if not tensor.is_contiguous() or not tensor.dtype.is_floating_point:
            raise ExportError(
                f"{self.file.path} holds a tensor of {tensor.dtype}, shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}",
                hint="only contiguous tensors of a floating dtype can be exported",
            )
        offset = tensor.untyped_storage()._checkpoint_offset
        assert offset is not None, self.file.path
        begin = offset + int(tensor.storage_offset()) * tensor.itemsize
        return StoredTensor(self.file, tensor.dtype, (tensor.numel(),), begin)


def _step_folder(folder: Path) -> Path:
    latest = folder / "latest"
    if not latest.is_file():
        return folder
    step = folder / latest.read_text(encoding="utf-8").strip()
    if not step.is_dir():
        raise ExportError(
            f"{latest} names the folder `{step.name}`, which does not exist",
            hint="name one of the step folders instead",
        )
    return step


def _read_ranks(
    step: Path, kind: str, keys: Collection[str], num_ranks: Callable[[_States], int], absent: ExportError
) -> list[_States]:
    """Load the state files of all data-parallel ranks; `kind` is `model` or `optim`. The first file says how many
    ranks there are. Raises the error `absent` if there is no file.
    """
    matches = ((path, _RANK_FILE.fullmatch(path.name)) for path in step.iterdir())
    files = {int(match["dp"]): path for path, match in matches if match and match["kind"] == kind}
    if not files:
        raise absent
    first = _States.read(files[min(files)], keys=keys)
    count = num_ranks(first)
    missing = [rank for rank in range(count) if rank not in files]
    if missing or len(files) > count:
        named = ", ".join(f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in missing)
        raise ExportError(
            f"{step} holds {len(files)} of {count} {kind} state files{f'; missing: {named}' if missing else ''}",
            hint="copy the files of every rank into the folder; each node writes its own",
        )
    return [first if path == first.file.path else _States.read(path, keys=keys) for _, path in sorted(files.items())]


def _read_model_states(step: Path) -> list[_States]:
    """Load the model states: one file at ZeRO stages 0 to 2, files of all ranks at stage 3."""
    full = [path for path in sorted(step.iterdir()) if _MODEL_FILE.fullmatch(path.name)]
    if full:
        return [_States.read(full[0], keys=_MODEL_KEYS)]
    absent = ExportError(
        f"{step} holds no *_model_states.pt file", hint="name the folder that holds `latest`, or the step folder in it"
    )
    return _read_ranks(step, "model", _MODEL_KEYS, lambda first: int(first.values["dp_world_size"]), absent)


def _read_optim_states(step: Path, model: Sequence[_States]) -> list[_States]:
    """Load the optimizer states of all ranks; none at ZeRO stage 0, where the model states have the full tensors."""
    if model[0].values.get("param_shapes") is None and not any(step.glob("*zero_pp_rank_*_optim_states.pt")):
        return []

    def num_ranks(first: _States) -> int:
        partitions = _zero(first)["partition_count"]
        return int(max(partitions) if isinstance(partitions, list) else partitions)

    absent = ExportError(
        f"{step} holds no *_optim_states.pt files, which contain the fp32 weights",
        hint="copy these files of every rank into the folder",
    )
    return _read_ranks(step, "optim", _OPTIM_KEYS, num_ranks, absent)


def _zero(states: _States) -> dict[str, Any]:
    return dict(states.values["optimizer_state_dict"])


_NamedTensor = tuple[str, SplitTensor]


def _stage_3_weights(
    step: Path, groups: Sequence[Mapping[str, Sequence[int]]], optim: Sequence[_States]
) -> Iterator[_NamedTensor]:
    """Yield weights of ZeRO stage 3. A rank's flat vector, stored in sub-groups, has a slice of every parameter."""
    vectors = [[states.stored(flat) for flat in _zero(states)["fp32_flat_groups"]] for states in optim]
    offset = 0
    for name, shape in ((name, tuple(shape)) for group in groups for name, shape in group.items()):
        numel = math.ceil(math.prod(shape) / len(optim))
        yield name, SplitTensor(shape, vectors, offset, numel)
        offset += numel
    _check_count(step, [_numel(vector) for vector in vectors], [offset] * len(vectors), "elements")


def _stage_1_and_2_weights(
    step: Path, groups: Sequence[Mapping[str, Sequence[int]]], optim: Sequence[_States]
) -> Iterator[_NamedTensor]:
    """Yield weights of ZeRO stages 1 and 2, where each parameter group is a flat vector that is partitioned over the
    ranks. The vector has the parameters in order, each followed by padding, whose length is in the state file.
    """
    paddings = _zero(optim[0]).get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    flats = [_zero(states)["single_partition_of_fp32_groups"] for states in optim]
    counts = [len(groups_of_file) for groups_of_file in (*flats, paddings)]
    _check_count(step, counts, [len(groups)] * len(counts), "parameter groups")
    for index, group in enumerate(groups):
        vector = [states.stored(flat[index]) for states, flat in zip(optim, flats, strict=True)]
        _check_count(step, [len(paddings[index])], [len(group)], "parameters")
        offset = 0
        for (name, shape), padding in zip(group.items(), paddings[index], strict=True):
            numel = math.prod(shape)
            yield name, SplitTensor(tuple(shape), [vector], offset, numel)
            offset += numel + int(padding)
        # A group's vector may be padded at its end to a multiple of 2 x ranks (zero_to_fp32.py:364-381).
        align = 2 * len(optim)
        present, expected = (align * math.ceil(numel / align) for numel in (_numel(vector), offset))
        _check_count(step, [present], [expected], "elements")


def _check_count(step: Path, present: Sequence[int], expected: Sequence[int], unit: str) -> None:
    for rank, (has, needs) in enumerate(zip(present, expected, strict=True)):
        if has != needs:
            raise ExportError(
                f"the optimizer states in {step} have {has} {unit}, the model states need {needs} (state file {rank})",
                hint="the folder mixes files of different saves; use the folder of another step",
            )


def _frozen_weights(model: Sequence[_States]) -> Iterator[_NamedTensor]:
    """Yield frozen parameters, which have no optimizer state. At ZeRO stage 3 they are stored in slices, at stage 2 as
    full tensors, and at stage 1 only in the entry `module` of the model states.
    """
    values = model[0].values
    sliced = values.get("frozen_param_fragments") or {}
    for name, shape in (values.get("frozen_param_shapes") or {}).items():
        vectors = [[states.stored(states.values["frozen_param_fragments"][name])] for states in model]
        yield name, SplitTensor(tuple(shape), vectors, 0, math.ceil(math.prod(shape) / len(model)))
    trained = {name for group in values.get("param_shapes") or () for name in group}
    others = trained | sliced.keys() | (values.get("shared_params") or {}).keys() | set(values["buffer_names"])
    for name, tensor in values["module"].items():
        if name not in others and tensor.numel():
            yield name, _full(model[0], tensor)


def _full(states: _States, tensor: torch.Tensor) -> SplitTensor:
    return SplitTensor(tuple(tensor.shape), [[states.stored(tensor)]], 0, tensor.numel())

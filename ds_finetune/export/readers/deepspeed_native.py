"""Checkpoints in DeepSpeed's own format (`engine.save_checkpoint`), ZeRO stages 0 to 3, read without DeepSpeed.

The format is that of DeepSpeed 0.19.8: runtime/engine.py:4319-4361 (file names), 5017-5038 (model states),
runtime/zero/stage_1_and_2.py:3358-3403 and stage3.py:3431-3447 (optimizer states), utils/zero_to_fp32.py (how
partitions of ranks are joined).
"""

import math
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ds_finetune.errors import ExportError
from ds_finetune.export.source import TensorSource
from ds_finetune.model.build.hub_folder import Scratch, check_folder
from ds_finetune.model.weights.safetensors_file import DataFile


class Inert:
    """Stands in for a pickled object of another program's class, and ignores its state."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class InertInt(int):
    """Stands in for a pickled member of an integer enumeration, e.g. `ZeroStageEnum`."""


def load_values(path: Path, stand_ins: Sequence[tuple[Any, str]]) -> dict[str, Any]:
    """The dictionary in the file `path`, with tensors on the meta device; `span_of` finds their data in the file.

    Unpickling constructs only classes of torch's own allow-list and those of `stand_ins`: pairs of an inert class and
    the pickled name that it replaces. ExportError for any other name, before anything of the pickle is executed.
    """
    try:
        with safe_globals(list(stand_ins)):
            unknown = sorted(get_unsafe_globals_in_checkpoint(str(path)))
            if unknown:
                raise ExportError(
                    f"{path} holds objects of {len(unknown)} unknown kinds: {', '.join(unknown)}",
                    hint="they could run code and were not loaded; export from a checkpoint that only DeepSpeed wrote",
                )
            tree = torch.load(path, map_location="meta", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as broken:
        reason = str(broken).splitlines()[0]
        raise ExportError(
            f"{path} cannot be read: {reason}",
            hint="the file is damaged, or torch.save did not write it; use an older checkpoint",
        ) from broken
    if not isinstance(tree, dict):
        raise ExportError(
            f"{path} holds a {type(tree).__name__}, not a dictionary", hint="name a folder that DeepSpeed wrote"
        )
    return tree


@dataclass(frozen=True)
class FileSpan:
    """`numel` consecutive elements of `dtype` in a file, from byte `offset`."""

    file: DataFile
    offset: int
    numel: int
    dtype: torch.dtype

    def read_into(self, view: memoryview) -> memoryview:
        """Fill the beginning of `view`; returns the rest of it. ExportError for a file that is too short."""
        size = self.numel * self.dtype.itemsize
        try:
            self.file.read_into(view[:size], self.offset)
        except EOFError as short:
            raise ExportError(f"{short}", hint="the file is damaged; use an older checkpoint") from short
        return view[size:]


def span_of(tensor: torch.Tensor, file: DataFile) -> FileSpan:
    """The data in `file` of a tensor that `load_values(file.path)` returned; ExportError where it is not contiguous.

    The storage of a tensor loaded to the meta device has its offset in the file (torch 2.13, serialization.py:2098).
    """
    if not tensor.is_contiguous() or not tensor.dtype.is_floating_point:
        raise ExportError(
            f"{file.path} holds a tensor of {tensor.dtype}, shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            hint="only contiguous tensors of a floating dtype can be exported",
        )
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None, file.path
    return FileSpan(file, offset + int(tensor.storage_offset()) * tensor.itemsize, tensor.numel(), tensor.dtype)


Vector = Sequence[FileSpan]
"""Spans of one dtype, possibly of several files, joined to one vector."""


def numel_of(vector: Vector) -> int:
    """Number of elements of a vector."""
    return sum(span.numel for span in vector)


def part_of(vector: Vector, start: int, numel: int) -> Iterator[FileSpan]:
    """Spans with the elements `start` to `start + numel` of a vector."""
    for span in vector:
        first, last = max(start, 0), min(start + numel, span.numel)
        if first < last:
            yield replace(span, offset=span.offset + first * span.dtype.itemsize, numel=last - first)
        start -= span.numel


@dataclass(frozen=True)
class SplitTensor:
    """A tensor in slices of `slice_numel` elements: slice i begins at element `offset` of `vectors[i]`.

    The last slice may have padding.
    """

    shape: tuple[int, ...]
    vectors: Sequence[Vector]
    offset: int
    slice_numel: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored elements; fp32 where there are none."""
        return next((span.dtype for vector in self.vectors for span in vector if span.numel), torch.float32)

    def spans(self, start: int, numel: int) -> Iterator[FileSpan]:
        """Spans with the elements `start` to `start + numel` of the flattened tensor, in order."""
        end = start + numel
        while start < end:
            index, skipped = divmod(start, self.slice_numel)
            count = min(self.slice_numel - skipped, end - start)
            yield from part_of(self.vectors[index], self.offset + skipped, count)
            start += count


_STAND_INS = (
    (Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (InertInt, "deepspeed.runtime.zero.config.ZeroStageEnum"),
)
"""DeepSpeed classes named in its files, each with the inert class that replaces it."""
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
"""File names of unsupported layouts, and their meaning."""
_MODEL_KEYS, _OPTIM_KEYS = ("module", "buffer_names", "dp_world_size"), ("optimizer_state_dict",)
_AUTOEP_KEYS = ("ds_autoep_layers", "autoep_layers")
_PREFIXES = ("module.", "lm.")


def is_deepspeed_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a checkpoint written by DeepSpeed: it has the file `latest`, or state files."""
    return (folder / "latest").is_file() or any(folder.glob("*_states.pt"))


def read_deepspeed_checkpoint(folder: Path) -> TensorSource:
    """Weights and persistent buffers of the checkpoint in `folder`, or in the step folder that its file `latest` names.

    Weights are the optimizer's fp32 master weights, or the stored weights where there are none. ExportError where a
    file is missing or the layout is not supported.
    """
    step = _step_folder(folder)
    check_folder(step)
    for path in sorted(step.iterdir()):
        for pattern, meaning in _UNSUPPORTED_LAYOUTS:
            if pattern.fullmatch(path.name):
                raise ExportError(f"{step} holds `{path.name}`: {meaning}, which is not supported", hint=_ELSEWHERE)
    model = _read_model_states(step)
    optim = _read_optim_states(step, model)
    stored = dict((*_trained_weights(step, model, optim), *_frozen_weights(model), *_buffers(model)))
    for alias, owner in (model[0].values.get("shared_params") or {}).items():
        if owner in stored:
            stored[alias] = stored[owner]
    prefix, scratch = _common_prefix(stored), Scratch()
    tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}

    def read(name: str, start: int, numel: int) -> torch.Tensor:
        flat = scratch.take(numel, tensors[name].dtype)
        view = flat.view(torch.uint8).numpy().data
        for span in tensors[name].spans(start, numel):
            assert span.dtype == flat.dtype, name
            view = span.read_into(view)
        assert not view, (name, start, numel)
        return flat

    buffers = frozenset(name.removeprefix(prefix) for name in model[0].values["buffer_names"])
    return TensorSource({name: tensor.shape for name, tensor in tensors.items()}, buffers, read)


@dataclass(frozen=True)
class _States:
    """A file of states: its values, with tensors on the meta device."""

    file: DataFile
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path, *, keys: Collection[str]) -> "_States":
        """Read the file at `path`; ExportError where one of `keys` is missing in it."""
        values = load_values(path, _STAND_INS)
        absent = sorted(set(keys) - values.keys())
        if absent:
            raise ExportError(
                f"{path} has no {', '.join(absent)}; it has {', '.join(map(str, values))}",
                hint="name a folder that DeepSpeed wrote",
            )
        return cls(DataFile(path), values)

    def span(self, tensor: torch.Tensor) -> FileSpan:
        return span_of(tensor, self.file)


def _step_folder(folder: Path) -> Path:
    latest = folder / "latest"
    if not latest.is_file():
        return folder
    step = folder / latest.read_text(encoding="utf-8").strip()
    if not step.is_dir():
        raise ExportError(
            f"{latest} names `{step.name}`, which is not there", hint="name one of the step folders itself"
        )
    return step


def _read_ranks(
    step: Path, kind: str, keys: Collection[str], num_ranks: Callable[[_States], int], absent: ExportError
) -> list[_States]:
    """State files of a kind of all data-parallel ranks, whose number the first file names; `absent` without files."""
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
    """The one file of ZeRO stages 0 to 2, or the files of all ranks at stage 3."""
    full = [path for path in sorted(step.iterdir()) if _MODEL_FILE.fullmatch(path.name)]
    if full:
        return [_States.read(full[0], keys=_MODEL_KEYS)]
    absent = ExportError(
        f"{step} holds no *_model_states.pt file", hint="name the folder that holds `latest`, or the step folder in it"
    )
    return _read_ranks(step, "model", _MODEL_KEYS, lambda first: int(first.values["dp_world_size"]), absent)


def _read_optim_states(step: Path, model: Sequence[_States]) -> list[_States]:
    """The files of all ranks; none at ZeRO stage 0, where the model states have full tensors."""
    if model[0].values.get("param_shapes") is None and not any(step.glob("*zero_pp_rank_*_optim_states.pt")):
        return []

    def num_ranks(first: _States) -> int:
        partitions = _zero(first)["partition_count"]
        return int(max(partitions) if isinstance(partitions, list) else partitions)

    absent = ExportError(
        f"{step} holds no *_optim_states.pt file, where the fp32 weights are",
        hint="copy those of every rank into the folder",
    )
    return _read_ranks(step, "optim", _OPTIM_KEYS, num_ranks, absent)


def _zero(states: _States) -> dict[str, Any]:
    return dict(states.values["optimizer_state_dict"])


_NamedTensor = tuple[str, SplitTensor]


def _trained_weights(step: Path, model: Sequence[_States], optim: Sequence[_States]) -> Iterator[_NamedTensor]:
    if not optim:
        return iter(())
    zero = _zero(optim[0])
    if "ds_zero_partition_groups" in zero or any(model[0].values.get(key) for key in _AUTOEP_KEYS):
        raise ExportError(f"{step}: {_UNSUPPORTED_LAYOUTS[0][1]}, which is not supported", hint=_ELSEWHERE)
    if "fp32_flat_groups" in zero:
        return _stage_3_weights(step, model[0].values["param_shapes"], optim)
    return _stage_1_and_2_weights(step, model[0].values["param_shapes"], optim)


def _stage_3_weights(
    step: Path, groups: Sequence[Mapping[str, Sequence[int]]], optim: Sequence[_States]
) -> Iterator[_NamedTensor]:
    """Each rank has a slice of every parameter, in order, in its flat vector, which is cut into sub-groups."""
    vectors = [[states.span(flat) for flat in _zero(states)["fp32_flat_groups"]] for states in optim]
    offset = 0
    for name, shape in ((name, tuple(shape)) for group in groups for name, shape in group.items()):
        numel = math.ceil(math.prod(shape) / len(optim))
        yield name, SplitTensor(shape, vectors, offset, numel)
        offset += numel
    _check_count(step, [numel_of(vector) for vector in vectors], [offset] * len(vectors), "elements")


def _stage_1_and_2_weights(
    step: Path, groups: Sequence[Mapping[str, Sequence[int]]], optim: Sequence[_States]
) -> Iterator[_NamedTensor]:
    """The joined partitions of a group hold its parameters in order; the state file gives the paddings."""
    paddings = _zero(optim[0]).get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    flats = [_zero(states)["single_partition_of_fp32_groups"] for states in optim]
    _check_count(
        step,
        [len(groups_of_file) for groups_of_file in (*flats, paddings)],
        [len(groups)] * (len(flats) + 1),
        "parameter groups",
    )
    for index, group in enumerate(groups):
        vector = [states.span(flat[index]) for states, flat in zip(optim, flats, strict=True)]
        _check_count(step, [len(paddings[index])], [len(group)], "parameters")
        offset = 0
        for (name, shape), padding in zip(group.items(), paddings[index], strict=True):
            numel = math.prod(shape)
            yield name, SplitTensor(tuple(shape), [vector], offset, numel)
            offset += numel + int(padding)
        # The end of the vector may be padded to a multiple of 2 x ranks (zero_to_fp32.py:364-381).
        align = 2 * len(optim)
        present, expected = (align * math.ceil(numel / align) for numel in (numel_of(vector), offset))
        _check_count(step, [present], [expected], "elements")


def _check_count(step: Path, present: Sequence[int], expected: Sequence[int], unit: str) -> None:
    for rank, (has, needs) in enumerate(zip(present, expected, strict=True)):
        if has != needs:
            raise ExportError(
                f"{step}: the flat weights hold {has} {unit} where the model states need {needs} (file {rank})",
                hint="files of different saves are mixed; use another step",
            )


def _frozen_weights(model: Sequence[_States]) -> Iterator[_NamedTensor]:
    """Parameters that the optimizer does not have.

    At ZeRO stage 3 they are slices, else full tensors; stage 1 has them only in `module`.
    """
    values = model[0].values
    sliced = values.get("frozen_param_fragments") or {}
    for name, shape in (values.get("frozen_param_shapes") or {}).items():
        vectors = [[states.span(states.values["frozen_param_fragments"][name])] for states in model]
        yield name, SplitTensor(tuple(shape), vectors, 0, math.ceil(math.prod(shape) / len(model)))
    trained = {name for group in values.get("param_shapes") or () for name in group}
    others = trained | sliced.keys() | (values.get("shared_params") or {}).keys() | set(values["buffer_names"])
    for name, tensor in values["module"].items():
        if name not in others and tensor.numel():
            yield name, _full(model[0], tensor)


def _buffers(model: Sequence[_States]) -> Iterator[_NamedTensor]:
    module = model[0].values["module"]
    return ((name, _full(model[0], module[name])) for name in model[0].values["buffer_names"])


def _full(states: _States, tensor: torch.Tensor) -> SplitTensor:
    return SplitTensor(tuple(tensor.shape), [[states.span(tensor)]], 0, tensor.numel())


def _common_prefix(names: Collection[str]) -> str:
    """The prefix that model wrappers added to all names."""
    prefix = ""
    while more := next((p for p in _PREFIXES if names and all(name.startswith(prefix + p) for name in names)), ""):
        prefix += more
    return prefix

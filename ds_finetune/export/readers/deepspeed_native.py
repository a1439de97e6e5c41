"""Checkpoints in DeepSpeed's own format (`engine.save_checkpoint`), ZeRO stages 0 to 3, read without DeepSpeed.

The format is that of DeepSpeed 0.19.8: runtime/engine.py:4319-4361 (file names), 5017-5038 (model states),
runtime/zero/stage_1_and_2.py:3358-3403 and stage3.py:3431-3447 (optimizer states), utils/zero_to_fp32.py (how
partitions of ranks are joined).
"""

import math
import pickle
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ds_finetune.errors import ExportError
from ds_finetune.model.build.hub_folder import Scratch, check_folder
from ds_finetune.model.weights.safetensors_file import DataFile


class Inert:
    """Replaces an object of a class of another program; ignores the object's state."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class InertInt(int):
    """Replaces a member of an integer enumeration, e.g. `ZeroStageEnum`."""


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

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill `view` with the bytes of the elements from `start`; ExportError where the file is too short."""
        try:
            self.file.read_into(view, self.offset + start * self.dtype.itemsize)
        except EOFError as short:
            raise ExportError(f"{short}", hint="the file is damaged; use an older checkpoint") from short


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


class FlatVector:
    """Spans of one dtype, possibly of several files, joined to one vector of `numel` elements."""

    def __init__(self, runs: Sequence[FileSpan]) -> None:
        self._runs = [run for run in runs if run.numel]
        self._starts = list(accumulate((run.numel for run in self._runs), initial=0))
        self.numel = self._starts[-1]
        self.dtype = self._runs[0].dtype if self._runs else torch.float32
        assert all(run.dtype == self.dtype for run in self._runs)

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill `view` with the bytes of the elements from `start`."""
        size = self.dtype.itemsize
        assert start >= 0
        assert start + len(view) // size <= self.numel
        index = bisect_right(self._starts, start) - 1
        while view:
            run, skipped = self._runs[index], start - self._starts[index]
            count = min(run.numel - skipped, len(view) // size)
            run.read_into(view[: count * size], skipped)
            view, start, index = view[count * size :], start + count, index + 1


@dataclass(frozen=True)
class Slices:
    """A tensor of `numel` elements in slices of `share` elements: slice i begins at element `offset` of `vectors[i]`.

    The last slice may have padding.
    """

    vectors: Sequence[FlatVector]
    offset: int
    share: int
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored elements."""
        return self.vectors[0].dtype

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill `view` with the bytes of the tensor's elements from `start`."""
        size = self.dtype.itemsize
        while view:
            index, skipped = divmod(start, self.share)
            count = min(self.share - skipped, len(view) // size)
            self.vectors[index].read_into(view[: count * size], self.offset + skipped)
            view, start = view[count * size :], start + count


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


@dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """The weights and persistent buffers of a checkpoint by the model's names, as a TensorSource.

    Weights are the optimizer's fp32 master weights, or the stored weights where there are none.
    """

    slices: Mapping[str, Slices]
    shapes: Mapping[str, tuple[int, ...]]
    fp32_names: Collection[str]
    _scratch: Scratch = field(default_factory=Scratch)

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the flattened tensor, valid until the same thread's next read."""
        flat = self._scratch.take(numel, self.slices[name].dtype)
        self.slices[name].read_into(flat.view(torch.uint8).numpy().data, start)
        return flat


def is_deepspeed_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a checkpoint written by DeepSpeed: it has the file `latest`, or state files."""
    return (folder / "latest").is_file() or any(folder.glob("*_states.pt"))


def read_deepspeed_checkpoint(folder: Path) -> DeepSpeedCheckpoint:
    """The checkpoint in `folder`, or in the step folder that its file `latest` names.

    ExportError where a file is missing or the layout is not supported.
    """
    step = _step_folder(folder)
    check_folder(step)
    for path in sorted(step.iterdir()):
        for pattern, meaning in _UNSUPPORTED_LAYOUTS:
            if pattern.fullmatch(path.name):
                raise ExportError(f"{step} holds `{path.name}`: {meaning}, which is not supported", hint=_ELSEWHERE)
    model = _read_model_states(step)
    optim = _read_optim_states(step, model)
    slices, shapes = dict[str, Slices](), dict[str, tuple[int, ...]]()
    for name, shape, where in (*_trained_weights(step, model, optim), *_frozen_weights(model), *_buffers(model)):
        slices[name], shapes[name] = where, shape
    for alias, owner in (model[0].values.get("shared_params") or {}).items():
        if owner in slices:
            slices[alias], shapes[alias] = slices[owner], shapes[owner]
    prefix = _common_prefix(slices)
    return DeepSpeedCheckpoint(
        {name.removeprefix(prefix): where for name, where in slices.items()},
        {name.removeprefix(prefix): shape for name, shape in shapes.items()},
        frozenset(name.removeprefix(prefix) for name in model[0].values["buffer_names"]),
    )


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


def _rank_files(step: Path, kind: str) -> dict[int, Path]:
    """State files of a kind by data-parallel rank."""
    matches = ((path, _RANK_FILE.fullmatch(path.name)) for path in step.iterdir())
    return {int(match["dp"]): path for path, match in matches if match and match["kind"] == kind}


def _all_ranks(step: Path, files: Mapping[int, Path], count: int, kind: str) -> list[Path]:
    missing = [rank for rank in range(count) if rank not in files]
    if missing or len(files) > count:
        named = ", ".join(f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in missing)
        raise ExportError(
            f"{step} holds {len(files)} of {count} {kind} state files{f'; missing: {named}' if missing else ''}",
            hint="copy the files of every rank into the folder; each node writes its own",
        )
    return [files[rank] for rank in range(count)]


def _read_model_states(step: Path) -> list[_States]:
    """The one file of ZeRO stages 0 to 2, or the files of all ranks at stage 3."""
    whole = [path for path in sorted(step.iterdir()) if _MODEL_FILE.fullmatch(path.name)]
    if whole:
        return [_States.read(whole[0], keys=_MODEL_KEYS)]
    files = _rank_files(step, "model")
    if not files:
        raise ExportError(
            f"{step} holds no *_model_states.pt file",
            hint="name the folder that holds `latest`, or the step folder in it",
        )
    first = _States.read(files[min(files)], keys=_MODEL_KEYS)
    paths = _all_ranks(step, files, int(first.values["dp_world_size"]), "model")
    return [first if path == first.file.path else _States.read(path, keys=_MODEL_KEYS) for path in paths]


def _read_optim_states(step: Path, model: Sequence[_States]) -> list[_States]:
    """The files of all ranks; none at ZeRO stage 0, where the model states have full tensors."""
    files = _rank_files(step, "optim")
    if not files and model[0].values.get("param_shapes") is None:
        return []
    if not files:
        raise ExportError(
            f"{step} holds no *_optim_states.pt file, where the fp32 weights are",
            hint="copy those of every rank into the folder",
        )
    first = _States.read(files[min(files)], keys=_OPTIM_KEYS)
    partitions = _zero(first)["partition_count"]
    count = int(max(partitions) if isinstance(partitions, list) else partitions)
    paths = _all_ranks(step, files, count, "optim")
    return [first if path == first.file.path else _States.read(path, keys=_OPTIM_KEYS) for path in paths]


def _zero(states: _States) -> dict[str, Any]:
    return dict(states.values["optimizer_state_dict"])


_NamedSlices = tuple[str, tuple[int, ...], Slices]


def _trained_weights(step: Path, model: Sequence[_States], optim: Sequence[_States]) -> Iterator[_NamedSlices]:
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
) -> Iterator[_NamedSlices]:
    """Each rank has a slice of every parameter, in order, in its flat vector, which is cut into sub-groups."""
    vectors = [FlatVector([states.span(flat) for flat in _zero(states)["fp32_flat_groups"]]) for states in optim]
    offset = 0
    for name, shape in ((name, tuple(shape)) for group in groups for name, shape in group.items()):
        share = math.ceil(math.prod(shape) / len(optim))
        yield name, shape, Slices(vectors, offset, share, math.prod(shape))
        offset += share
    _check_count(step, [vector.numel for vector in vectors], [offset] * len(vectors), "elements")


def _stage_1_and_2_weights(
    step: Path, groups: Sequence[Mapping[str, Sequence[int]]], optim: Sequence[_States]
) -> Iterator[_NamedSlices]:
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
        vector = FlatVector([states.span(flat[index]) for states, flat in zip(optim, flats, strict=True)])
        _check_count(step, [len(paddings[index])], [len(group)], "parameters")
        offset = 0
        for (name, shape), padding in zip(group.items(), paddings[index], strict=True):
            numel = math.prod(shape)
            yield name, tuple(shape), Slices([vector], offset, numel, numel)
            offset += numel + int(padding)
        # The end of the vector may be padded to a multiple of 2 x ranks (zero_to_fp32.py:364-381).
        align = 2 * len(optim)
        _check_count(step, [align * math.ceil(vector.numel / align)], [align * math.ceil(offset / align)], "elements")


def _check_count(step: Path, present: Sequence[int], expected: Sequence[int], unit: str) -> None:
    for rank, (has, needs) in enumerate(zip(present, expected, strict=True)):
        if has != needs:
            raise ExportError(
                f"{step}: the flat weights hold {has} {unit} where the model states need {needs} (file {rank})",
                hint="files of different saves are mixed; use another step",
            )


def _frozen_weights(model: Sequence[_States]) -> Iterator[_NamedSlices]:
    """Parameters that the optimizer does not have.

    At ZeRO stage 3 they are slices, else full tensors; stage 1 has them only in `module`.
    """
    values = model[0].values
    sliced = values.get("frozen_param_fragments") or {}
    known = {name for group in values.get("param_shapes") or () for name in group}
    for name, shape in (values.get("frozen_param_shapes") or {}).items():
        vectors = [FlatVector([states.span(states.values["frozen_param_fragments"][name])]) for states in model]
        yield name, tuple(shape), Slices(vectors, 0, math.ceil(math.prod(shape) / len(model)), math.prod(shape))
    left_out = known | sliced.keys() | (values.get("shared_params") or {}).keys() | set(values["buffer_names"])
    for name, tensor in values["module"].items():
        if name not in left_out and tensor.numel():
            yield name, *_whole(model[0], tensor)


def _buffers(model: Sequence[_States]) -> Iterator[_NamedSlices]:
    module = model[0].values["module"]
    return ((name, *_whole(model[0], module[name])) for name in model[0].values["buffer_names"])


def _whole(states: _States, tensor: torch.Tensor) -> tuple[tuple[int, ...], Slices]:
    return tuple(tensor.shape), Slices([FlatVector([states.span(tensor)])], 0, tensor.numel(), tensor.numel())


def _common_prefix(names: Collection[str]) -> str:
    """The prefix that model wrappers added to all names."""
    prefix = ""
    while more := next((p for p in _PREFIXES if names and all(name.startswith(prefix + p) for name in names)), ""):
        prefix += more
    return prefix

"""Writes a Hugging Face folder tensor by tensor: shards, index, config.json and tokenizer.

The folder gets its final name only when it is complete.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ds_finetune.console.phase_line import PhaseLine
from ds_finetune.errors import ExportError, OutputError
from ds_finetune.export.model_config import NAMED_TEMPLATES, served_config, write_files
from ds_finetune.export.output_folder import as_output_errors, replaced_folder
from ds_finetune.export.shards import PIECE_NUMEL, HubTensor, ShardWriter, plan_shards
from ds_finetune.export.verify.record import ExportRecord
from ds_finetune.families.family import Family
from ds_finetune.families.text_part import is_composite
from ds_finetune.model.build.dtypes import dtype_name
from ds_finetune.model.build.hub_folder import HubFolder
from ds_finetune.model.loss.score_config import is_classifier
from ds_finetune.model.quantised.fp8 import BYTE_SCALE, FP8, QUANTIZATION_CONFIG, is_quantised
from ds_finetune.model.quantised.quantisation import EXPERT_DTYPE, FP4
from ds_finetune.model.weights.names import hub_pieces, joined_qkv

SECTION = "quantization_config"
_SCALE_FORMAT, _POWERS_OF_TWO = "scale_fmt", "ue8m0"
_SCALE_FORMATS = (None, "float", _POWERS_OF_TWO)
_NOT_CONVERTED = ("modules_to_not_convert", "ignored_layers")
"""Keys of `quantization_config` that list modules without FP8 weights. A config.json has at most one of the keys."""
_WEIGHT = ".weight"


def writable_section(config: Mapping[str, Any], file: Path) -> Mapping[str, Any] | None:
    """Look up `quantization_config` in a base model's config.json, which was read from `file`; None if it has none.
    ExportError if exports cannot be written in this quantised format.
    """
    given = config.get(SECTION)
    if given is None:
        return None
    section: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    differs = any(section.get(key) != value for key, value in QUANTIZATION_CONFIG.items())
    if differs or section.get(_SCALE_FORMAT) not in _SCALE_FORMATS:
        raise ExportError(
            f"{file}: {SECTION} is {given}; exports in FP8 support only {dict(QUANTIZATION_CONFIG)}, with or without "
            f"{_SCALE_FORMAT} {_POWERS_OF_TWO}",
            hint="export with --dtype bf16",
        )
    return section


def section_for(tensors: Collection[HubTensor], base: Mapping[str, Any] | None) -> dict[str, Any]:
    """Make the `quantization_config` of an exported FP8 folder with `tensors`.

    If `base`, the base model's section, is given, modules that are now in FP8 are removed from its list of unquantised
    modules. Otherwise each module with a matrix that is not in FP8 is listed, because servers expect every unlisted
    linear layer in FP8, even Qwen3's routers.
    """
    if base is None:
        plain = (
            tensor.key.removesuffix(_WEIGHT)
            for tensor in tensors
            if tensor.key.endswith(_WEIGHT) and len(tensor.shape) == 2 and tensor.dtype != FP8
        )
        return {**QUANTIZATION_CONFIG, _NOT_CONVERTED[0]: [*plain]}
    section = {**QUANTIZATION_CONFIG}
    section |= {key: base[key] for key in (_SCALE_FORMAT, *_NOT_CONVERTED) if base.get(key) is not None}
    in_fp8 = {tensor.key.removesuffix(_WEIGHT) for tensor in tensors if tensor.dtype == FP8}
    for key in _NOT_CONVERTED:
        if key in section:
            section[key] = [module for module in section[key] if module not in in_fp8]
    return section


CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""Names of files with chat templates, which override the templates in tokenizer_config.json."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *CHAT_TEMPLATES,
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Names of the files of a tokenizer, and of processors of images and sound."""
_WEIGHTS = ".safetensors"


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The tokenizer files in `folder`, by name."""
    named = (f"{NAMED_TEMPLATES}/{path.name}" for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja")))
    return {name: folder / name for name in (*TOKENIZER_FILES, *named) if (folder / name).is_file()}


Specs = Mapping[str, torch.Tensor]
"""Tensors on the meta device that give the names, shapes, dtypes and order of the tensors to write."""


@dataclass(frozen=True, kw_only=True)
class FolderParts:
    """The contents of an exported folder other than the model's tensors, and how tensors are stored."""

    family: Family
    config: dict[str, Any]
    """The base model's config.json as parsed from JSON, not as transformers would write it."""
    architecture: str
    dtype: torch.dtype
    """Dtype of exported tensors, except those that stay in fp32 and, if `is_fp8`, linear weights."""
    files: tuple[Path, ...]
    """Files to copy to the export; `auto_map`, which names Python code, is removed from tokenizer_config.json."""
    is_fp8: bool = False
    fp8_base: HubFolder | None = None
    """FP8 folder of the base model. Blocks that training did not change are copied from it byte for byte."""
    base_tensors: Sequence[HubTensor] = ()
    """Base tensors for which transformers' class has no module. They are written after the model's tensors."""
    copy_base_tensors: Callable[[ShardWriter], object] | None = None
    """Function that writes `base_tensors`; None if there are none."""
    composite: HubFolder | None = None
    """Model that combines text with images or sound. The export copies all its parts except the trained text part."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Further tensors of the export that are copies: from their names to the names of the copied tensors."""
    record: ExportRecord | None = None
    """Record with which the exported folder will be verified; None if no record is written."""
    texts: dict[str, str] = field(default_factory=dict)
    """Further files of the export as text, by file name, e.g. a chat template given in the run file."""

    @property
    def other_parts(self) -> list[HubTensor]:
        """Tensors of the model's parts for images or sound; empty for a model of text only."""
        others = self.composite.others if self.composite is not None else {}
        return [HubTensor(key, stored.shape, stored.dtype) for key, stored in others.items()]

    @cached_property
    def base_section(self) -> Mapping[str, Any] | None:
        """The `quantization_config` of the base model; None if it is not in FP8. If `config` lacks this section, as
        beside a run's checkpoint, it is read from the folder `fp8_base`.
        """
        given: Mapping[str, Any] | None = self.config.get(SECTION)
        if given is not None or self.fp8_base is None:
            return given
        file = self.fp8_base.folder / "config.json"
        return writable_section(json.loads(file.read_text(encoding="utf-8")), file) if file.is_file() else None

    @property
    def has_scales_of_two(self) -> bool:
        """Whether the scales of FP8 blocks are powers of two (UE8M0), as in the base model."""
        return self.is_fp8 and (self.base_section or {}).get(_SCALE_FORMAT) == _POWERS_OF_TWO

    def scale_dtype(self, key: str) -> torch.dtype:
        """Dtype of the scales of the FP8 weight `key`: one exponent byte if the base model stores it so, else fp32."""
        base = self.fp8_base
        is_byte = base is not None and base.is_fp8(key) and base.scale_dtype(key) == BYTE_SCALE
        return BYTE_SCALE if is_byte and self.has_scales_of_two else torch.float32

    def scale_key(self, key: str) -> str:
        """Name of the tensor with the scales of the quantised weight `key`."""
        return key.removesuffix(_WEIGHT) + self.family.fp8_scale

    def in_fp4(self, key: str) -> bool:
        """Whether the tensor `key` is written in FP4, as it is in the base model."""
        return self.is_fp8 and self.fp8_base is not None and self.fp8_base.fp4(key) is not None

    def in_fp8(self, key: str, shape: tuple[int, ...]) -> bool:
        """Whether the tensor `key` is written in FP8 blocks: by the family's rule, else as in the base model."""
        if self.is_fp8 and self.family.fp8_linear is None:
            return self.fp8_base is not None and key in self.fp8_base.shapes and self.fp8_base.is_fp8(key)
        return self.is_fp8 and is_quantised(key, shape, self.family)


def write_folder(
    tensors: Iterable[tuple[str, torch.Tensor | None]],
    specs: Specs,
    out: Path,
    parts: FolderParts,
    *,
    max_shard_bytes: int,
) -> None:
    """Write `tensors` and the files of `parts` to `out`, which appears only when complete.

    `tensors` are full, on the CPU, and have the model's names; `specs` has their names, shapes and dtypes. Every rank
    must consume `tensors`, which yields None instead of a tensor on ranks that write nothing. One tensor at a time is
    in memory, without a copy.
    """
    with ExitStack() as stack, PhaseLine("exporting tensors", len(specs)) as line:
        writer: ShardWriter | None = None
        for name, tensor in tensors:
            if tensor is not None:
                writer = writer or stack.enter_context(
                    folder_writer(_pieces(specs, parts), out, parts, max_shard_bytes=max_shard_bytes)
                )
                _write_tensor(writer, name, tensor, specs[name], parts)
            # The tensor is released before the next one is gathered, so that only one is in memory.
            del tensor
            line.advance()


def _write_tensor(writer: ShardWriter, name: str, tensor: torch.Tensor, spec: torch.Tensor, parts: FolderParts) -> None:
    if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
        raise ExportError(
            f"tensor `{name}` has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected "
            f"{tuple(spec.shape)} and {spec.dtype}",
            hint="this is a fault of the program: please report it",
        )
    shape, flat = tuple(tensor.shape), tensor.contiguous().view(-1)
    for piece in hub_pieces(name, shape, parts.family):
        begin = piece.first_element(shape)
        writer.write(piece.key, 0, flat[begin : begin + math.prod(piece.shape)])
    for copy in (copy for copy, original in parts.copies.items() if original == name):
        writer.write(copy, 0, flat)


def _pieces(specs: Specs, parts: FolderParts) -> Iterator[HubTensor]:
    for name, spec in specs.items():
        for piece in hub_pieces(name, tuple(spec.shape), parts.family):
            yield HubTensor(piece.key, piece.shape, spec.dtype)
    for copy, original in parts.copies.items():
        yield HubTensor(copy, tuple(specs[original].shape), specs[original].dtype)


@contextmanager
def folder_writer(
    tensors: Iterable[HubTensor], out: Path, parts: FolderParts, *, max_shard_bytes: int
) -> Iterator[ShardWriter]:
    """Context with a writer of `tensors` to `out`, which is complete when the context ends without an error.

    The other tensors and files of `parts` are written at the end; then an older `out` is replaced. ExportError if the
    model combines text with images or sound, and no folder is known from which to copy the parts other than text.
    """
    if is_composite(parts.config) and parts.composite is None:
        raise ExportError(
            f"model_type `{parts.config.get('model_type')}` combines text with images or sound; only its text part was "
            "trained, and the folder with its other parts is not known",
            hint="set --base to the folder of the model that training started from",
        )
    all_tensors, composite = [*tensors, *parts.base_tensors], parts.composite
    names, fused, others = (composite.published, composite.fused, composite.others) if composite else ({}, {}, {})
    joined = joined_qkv({each.key: each.shape for each in all_tensors}, parts.family)
    names = {**names, **{part: (key, first) for part, (key, first, _) in joined.items()}}
    fused = {**fused, **{key: shape for key, _, shape in joined.values()}}
    all_tensors = [replace(each, key=names.get(each.key, (each.key,))[0]) for each in all_tensors] + parts.other_parts
    # Several tensors may be stored as one, e.g. all experts of a layer. The dictionary then has their name once.
    all_tensors = [*{each.key: replace(each, shape=fused.get(each.key, each.shape)) for each in all_tensors}.values()]
    with replaced_folder(out) as partial:
        with closing(ShardWriter(partial, plan_shards(all_tensors, max_shard_bytes), names)) as writer:
            yield writer
            if parts.copy_base_tensors is not None:
                parts.copy_base_tensors(writer)
            sizes = {key: math.prod(stored.shape) for key, stored in others.items()}
            for key, start in ((key, at) for key, numel in sizes.items() for at in range(0, numel, PIECE_NUMEL)):
                writer.write(key, start, others[key].read(start, min(PIECE_NUMEL, sizes[key] - start)))
            writer.finish()
        with as_output_errors(partial):
            _write_config_and_files(partial, parts, all_tensors)
            if parts.record is not None:
                replace(parts.record, digests=writer.digests()).write(partial)


def link_folder(source: Path, out: Path) -> bool:
    """Copy the folder `source` to `out`, with hard links to its weight files. Returns False if links are not possible.
    Other files are copied, because they may change later, e.g. the file UNVERIFIED.
    """
    try:
        with replaced_folder(out) as partial:
            for file in (file for file in source.rglob("*") if file.name != NAMED_TEMPLATES):
                target = partial / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                (os.link if file.suffix == _WEIGHTS else shutil.copyfile)(file, target)
    except (OSError, OutputError):
        return False
    return True


def has_same_weights(folder: Path, other: Path) -> bool:
    """Whether the weight files of two folders are hard links to the same data, as `link_folder` makes them."""
    own_files, other_files = ({file.name: file for file in each.glob(f"*{_WEIGHTS}")} for each in (folder, other))
    if not own_files or own_files.keys() != other_files.keys():
        return False
    return all(file.samefile(other_files[name]) for name, file in own_files.items())


def _write_config_and_files(folder: Path, parts: FolderParts, tensors: Collection[HubTensor]) -> None:
    config = served_config(parts.config, parts.family, [tensor.key for tensor in tensors])
    if is_classifier({"architectures": [parts.architecture]}):
        config["architectures"] = [parts.architecture]
    if parts.composite is None:
        config.setdefault("architectures", [parts.architecture])
    key = "dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"
    config[key] = dtype_name(parts.dtype)
    if parts.is_fp8:
        config[SECTION] = section_for(tensors, parts.base_section)
        if any(parts.in_fp4(tensor.key) for tensor in tensors):
            config[EXPERT_DTYPE] = FP4
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_files(folder, parts.files, parts.texts)

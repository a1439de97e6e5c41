"""Converts a checkpoint, an adapter or a model to a Hugging Face folder, for the command `ds-finetune export`."""

import json
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ds_finetune.config.units import bytes_text
from ds_finetune.data.prompt_format import GENERATION, PromptFormat
from ds_finetune.errors import ExportError, OutputError
from ds_finetune.export.base_folder import BaseFolder
from ds_finetune.export.convert import Conversion, num_workers
from ds_finetune.export.fitted_tokenizer import fit_folder
from ds_finetune.export.formats import ExportResult
from ds_finetune.export.model_config import config_changes
from ds_finetune.export.output_folder import check_out_empty
from ds_finetune.export.readers.sources import OpenedSource, open_source
from ds_finetune.export.safetensors_folder import FolderParts, tokenizer_files, writable_section
from ds_finetune.export.source import ModelSpec, fit_source, read_model_spec
from ds_finetune.export.verify.record import ExportRecord, classifier_prompts, fixed_prompts
from ds_finetune.families.table import family_of
from ds_finetune.families.text_part import is_composite
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.dtypes import PRECISION_DTYPES, dtype_name
from ds_finetune.model.build.hub_folder import check_folder, has_weights
from ds_finetune.model.loss.score_config import is_classifier
from ds_finetune.model.quantised.fp8 import FP8 as FP8_DTYPE
from ds_finetune.model.weights.names import published_names
from ds_finetune.system.disk import nearest_existing

FP8 = "fp8"
"""Value of `--dtype` for linear weights in FP8 blocks, as DeepSeek-V3 is published, with other weights in bf16."""


def export_checkpoint(path: Path, out: Path, *, dtype: str, max_shard_bytes: int, base: Path | None) -> ExportResult:
    """Convert the checkpoint or model in `path` to the Hugging Face folder `out`, with weights in `dtype`.

    config.json and tokenizer come from `base`, else from `path`. A full model, a classifier and a checkpoint with a
    resized vocabulary always keep their own. Base tensors for which transformers' class has no module are copied.

    ExportError or ModelError if the source cannot be read or does not fit the model class of config.json; OutputError
    if `out` is not empty, or larger than the free space of the disk.
    """
    began = time.monotonic()
    check_out_empty(out)
    if base is not None:
        if not (base / "config.json").is_file():
            raise ExportError(
                f"--base `{base}` has no config.json", hint="name the folder of the model that training started from"
            )
        check_folder(base)
    named = () if base is None else (base,)
    opened = open_source(path, base)
    folders = (*opened.folders, *named) if opened.is_model or opened.has_own_config else (*named, *opened.folders)
    spec = read_model_spec(_config_file(folders).parent)
    source = fit_source(opened.source, spec, label=str(path))
    parts = _parts(folders, spec, opened, dtype)
    written = published_names(source.shapes, parts.family)
    parts, notes = _with_base(parts, spec, opened, base, without=written)
    source = source.with_copies(parts.copies)
    conversion = Conversion(source, parts, num_workers())
    tensors = [*conversion.tensors, *parts.base_tensors, *parts.other_parts]
    unbuilt = [name for name in source.shapes if spec.may_skip(name) and name not in parts.copies]
    origin, no_module = opened.hub.folder if opened.hub else path, "for which transformers' class has no module"
    notes = [
        *(f"{len(unbuilt)} tensors of {origin} {no_module} are kept, e.g. {name}" for name in unbuilt[:1]),
        *notes,
        *config_changes(parts.config, parts.files, [tensor.key for tensor in tensors]),
    ]
    if parts.is_fp8 and parts.family.fp8_linear is None and parts.fp8_base is None:
        raise ExportError(
            f"for model_type {spec.model_type} it is not known which weights belong in FP8",
            hint="name a published FP8 folder of the model by --base, or export with --dtype bf16",
        )
    if parts.is_fp8 and all(tensor.dtype != FP8_DTYPE for tensor in tensors):
        raise ExportError(
            f"{path} cannot be exported in FP8: {spec.architecture} has no linear weights that are published in FP8",
            hint="export with --dtype bf16",
        )
    size = sum(tensor.num_bytes for tensor in tensors)
    check_free_space(out, size)
    num_blocks, num_copied = conversion.write(out, max_shard_bytes=max_shard_bytes)
    if parts.fp8_base:
        notes.append(
            f"{num_copied:,} of {num_blocks:,} quantised blocks equal those of {parts.fp8_base.folder} and were copied "
            "byte for byte"
        )
    return ExportResult(
        folder=out, num_tensors=len(tensors), num_bytes=size, seconds=time.monotonic() - began, notes=tuple(notes)
    )


def _with_base(
    parts: FolderParts, spec: ModelSpec, opened: OpenedSource, named: Path | None, *, without: Collection[str]
) -> tuple[FolderParts, list[str]]:
    folder = named or opened.base
    if parts.is_fp8 and is_composite(parts.config):
        raise ExportError(
            f"model_type `{parts.config['model_type']}` combines text with images or sound, and cannot be exported "
            "in FP8",
            hint="export with --dtype bf16",
        )
    if opened.hub is not None and opened.hub.published:
        parts = replace(parts, composite=opened.hub)
    if parts.is_fp8 and opened.hub and opened.hub.has_fp8:
        parts = replace(parts, fp8_base=opened.hub)
    if spec.is_classifier:
        # No base tensor is copied: a classifier uses neither language-model head nor multi-token prediction layers.
        return parts, []
    if opened.hub and folder in (None, opened.hub.folder):
        # LoRA may change embedding and head; their copies in a multi-token prediction layer must change too.
        base = None if opened.is_model else BaseFolder.from_hub(opened.hub, spec)
        return base.with_copies(parts, base.unbuilt) if base else (parts, [])
    if folder is not None and has_weights(folder):
        base_spec = read_model_spec(folder) if opened.has_own_config else spec
        return BaseFolder.read(folder, base_spec).with_base_tensors(parts, without=without)
    why = opened.why_no_base if folder is None else f"{folder} has no safetensors"
    return parts, [] if opened.is_model else [f"nothing was copied from a base: {why}"]


def check_free_space(out: Path, size: int) -> None:
    """Raise OutputError if the disk of `out` has less than `size` bytes free."""
    free = shutil.disk_usage(nearest_existing(out)).free
    if size > free:
        raise OutputError(
            f"the export to `{out}` needs {bytes_text(size)}, and the disk has {bytes_text(free)} free",
            hint="free some space or name another folder",
        )


def _config_file(folders: tuple[Path, ...]) -> Path:
    file = _first(folders, "config.json")
    if file is None:
        searched = ", ".join(map(str, folders))
        raise ExportError(
            f"no config.json in {searched}", hint="set --base to the folder of the model that training started from"
        )
    return file


def beside_weights(folders: Sequence[Path]) -> list[Path]:
    """Choose the generation_config.json and the tokenizer files of an export. Tokenizer files come from the first of
    `folders` that has any, because files of two tokenizers do not fit together.
    """
    generation = _first(folders, GENERATION)
    tokenizer = next(filter(None, map(tokenizer_files, folders)), {})
    return [*([generation] if generation else []), *tokenizer.values()]


def _first(folders: Sequence[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _parts(folders: tuple[Path, ...], spec: ModelSpec, opened: OpenedSource, dtype: str) -> FolderParts:
    file = _config_file(folders)
    config = json.loads(file.read_text(encoding="utf-8"))
    if dtype == FP8:
        writable_section(config, file)
    plain = torch.bfloat16 if dtype == FP8 else PRECISION_DTYPES[dtype]
    files = beside_weights((opened.trained, *folders) if opened.trained else folders)
    record = opened.record
    if record is None:
        # No run has recorded logits of this model. Verification then compares the digests of tensors, and requires that
        # the model loads and gives finite logits.
        model = AutoConfig.from_pretrained(file.parent, trust_remote_code=False)
        vocab_size, base = int(model.get_text_config().vocab_size), str((opened.base or file.parent).absolute())
        record = ExportRecord(base, dtype_name(plain), vocab_size, fixed_prompts(vocab_size, None))
        if is_classifier(model):
            prompts = classifier_prompts(vocab_size, pad=model.pad_token_id, ending=())
            record = replace(record, prompts=prompts, num_labels=int(model.num_labels))
    fitted = fit_folder(files, config)
    if fitted and not record.text_ids:
        record = record.with_tokens(PromptFormat.of_tokenizer(fitted[0]), fitted[0])
    return FolderParts(
        family=family_of(spec.model_type),
        config=config,
        architecture=spec.architecture,
        dtype=plain,
        is_fp8=dtype == FP8,
        files=tuple(files),
        record=record,
        texts=fitted[1] if fitted else {},
    )

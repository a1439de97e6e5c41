"""Command `ds-finetune export --format onnx`: writes a folder for ONNX Runtime, verified before it gets its name."""

import json
import shutil
import time
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ds_finetune.config.units import MIB
from ds_finetune.errors import ExportError, VerificationError
from ds_finetune.export.file_record import verify_files
from ds_finetune.export.formats import ONNX, ExportOptions, ExportResult, Scorer
from ds_finetune.export.from_checkpoint import check_free_space
from ds_finetune.export.onnx.comparison import OnnxComparison, compare, make_reference
from ds_finetune.export.onnx.consumers import write_settings
from ds_finetune.export.onnx.decoder import check_config, decoder_graph, scoring_graph
from ds_finetune.export.onnx.encoders import check_encoder_config, encoder_graph
from ds_finetune.export.onnx.graph import write_model
from ds_finetune.export.onnx.quantise import BITS, own_reference, quantise_weights
from ds_finetune.export.onnx.record import FORMAT, compare_with_record, weights_at, write_record
from ds_finetune.export.onnx.runtime import OnnxCausalLM, OnnxScorer
from ds_finetune.export.output_folder import as_output_errors, check_out_empty, replaced_folder
from ds_finetune.export.plain_source import copy_settings, plain_folder, plain_model
from ds_finetune.export.verify.record import UNVERIFIED
from ds_finetune.export.verify.verify import VerificationResult
from ds_finetune.families.table import family_of
from ds_finetune.model.build.hub_folder import HubFolder, check_weight_files
from ds_finetune.model.loss.score_config import is_classifier

INLINE_BYTES = 256 * MIB
"""Weights of more bytes than this get a file of their own, since a protobuf message must be smaller than 2 GiB."""


def write(source: Path, out: Path, options: ExportOptions) -> ExportResult:
    """Write the language model or classifier of `source` to `out` as onnx/model.onnx, with tokenizer and configuration.
    Raises the errors of `FormatModule.write`. After a VerificationError the folder is kept as `out`.unverified.
    """
    began = time.monotonic()
    check_out_empty(out)
    unverified = _unverified(out)
    if not (unverified / UNVERIFIED).is_file():
        check_out_empty(unverified)
    with plain_folder(source, out, options.base) as folder:
        comparison, notes = _write_and_compare(source, folder, out, options)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return ExportResult(
        folder=out,
        num_bytes=size,
        seconds=time.monotonic() - began,
        notes=(f"verified: {comparison.line()}", *notes),
        verdict=VerificationResult(out, lines=(comparison.line(), *notes)),
    )


verify = partial(verify_files, kind=FORMAT, parts_at=weights_at, compare=compare_with_record)


def check_model(
    config: PretrainedConfig, *, is_classifier: bool, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raise ExportError if ONNX graphs do not support the model's type, activation, rotary embedding or attention."""
    is_encoder = is_classifier and family_of(config.model_type).encoder is not None
    (check_encoder_config if is_encoder else check_config)(config)


def load_model(folder: Path, device: str) -> PreTrainedModel:
    """Load the causal LM of `folder` in ONNX Runtime. It runs on the CPU, whatever `device` is."""
    return OnnxCausalLM.from_pretrained(folder)


def load_scorer(folder: Path) -> Scorer:
    """Load the classifier of `folder` in ONNX Runtime on the CPU, as a function from token ids to class logits."""
    runtime = OnnxScorer(folder)
    return lambda inputs: torch.from_numpy(runtime.logits({key: part.numpy() for key, part in inputs.items()}))


def _write_and_compare(
    source: Path, folder: Path, out: Path, options: ExportOptions
) -> tuple[OnnxComparison, list[str]]:
    model, hub = plain_model(folder, check_model)
    check_weight_files(folder)
    if options.dtype in BITS and is_classifier(model.config):
        raise ExportError(
            f"the model is a classifier, and --dtype {options.dtype} supports only language models",
            hint="export with --dtype fp32 or fp16",
        )
    if options.dtype in BITS and find_spec("onnx_ir") is None:
        raise ExportError(f"--dtype {options.dtype} needs onnx_ir", hint="pip install 'ds_finetune[onnx]'")
    with_cache = options.with_cache and not is_classifier(model.config)
    with replaced_folder(out) as new:
        with as_output_errors(new):
            _write_graph(model, hub, new, options)
        reference = make_reference(folder)
        comparison = compare(new, reference)
        about = {
            "dtype": options.dtype,
            "cache": with_cache,
            **asdict(comparison),
            "versions": {name: version(name) for name in (*ONNX.packages, "torch", "transformers")},
        }
        if comparison.failures:
            (new / UNVERIFIED).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
            unverified = _unverified(out)
            shutil.rmtree(unverified, ignore_errors=True)
            new.rename(unverified)
            raise VerificationError(
                f"ONNX Runtime differs from transformers, with a tolerance of {comparison.tolerance:g} of the largest "
                f"logit: {'; '.join(comparison.failures)}",
                hint=f"do not serve {unverified}, which was kept for inspection; "
                f"{'try --dtype fp32' if options.dtype == 'fp16' else 'please report this'}",
            )
        notes = []
        if options.dtype in BITS:
            with as_output_errors(new):
                notes = [quantise_weights(new, options.dtype, source, inline_bytes=INLINE_BYTES).line()]
            reference = own_reference(new, reference)
        with as_output_errors(new):
            notes += write_settings(new, model.config, dtype=options.dtype, with_cache=with_cache)
        write_record(new, reference, about)
        return comparison, notes


def _unverified(out: Path) -> Path:
    return out.with_name(out.name + ".unverified")


def _write_graph(model: PreTrainedModel, hub: HubFolder, out: Path, options: ExportOptions) -> None:
    numbers = np.dtype(np.float16 if options.dtype == "fp16" else np.float32)
    if is_classifier(model.config):
        build = encoder_graph if family_of(model.config.model_type).encoder else scoring_graph
        graph, ends = build(model, hub.full_tensor, dtype=numbers)
    else:
        graph, ends = decoder_graph(model, hub.full_tensor, dtype=numbers, with_cache=options.with_cache)
    check_free_space(out, sum(weight.num_bytes for weight in graph.weights.values()))
    write_model(graph, ends, out, inline_bytes=INLINE_BYTES)
    copy_settings(hub.folder, out)

"""`ds-finetune export --format onnx`: a folder for ONNX Runtime, which has its final name only once it is verified."""

import errno
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ds_finetune.config.units import GIB, MIB
from ds_finetune.errors import ExportError, OutputError, VerificationError
from ds_finetune.export.classifiers import auto_class
from ds_finetune.export.from_checkpoint import COPIED_FILES, check_free_space, export_checkpoint
from ds_finetune.export.model_config import remove_code
from ds_finetune.export.output_folder import check_out_empty
from ds_finetune.export.readers.sources import is_model, is_peft_adapter
from ds_finetune.export.verify.record import UNVERIFIED
from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.hub_folder import check_folder, copy_model_file
from ds_finetune.model.loss.score_config import is_classifier
from ds_finetune.model.weights.load import open_weights

if TYPE_CHECKING:
    from ds_finetune.export.onnx.comparison import OnnxComparison

INLINE_BYTES = 256 * MIB
"""Weights of more bytes than this are written to model.onnx.data: a protobuf message must stay below 2 GiB and is held
in memory.
"""
ONNX_DTYPES = {"fp32": "float32", "fp16": "float16"}
_PACKAGES = ("onnx", "onnxruntime")
_SHARD_BYTES = 5 * 10**9
_PLAIN_COPY = "make a bf16 copy of it first, where it is in FP8 blocks by `ds-finetune export SOURCE COPY`"
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)


@dataclass(frozen=True)
class OnnxExportResult:
    """What was written, and how it compares with plain transformers."""

    folder: Path
    num_bytes: int
    comparison: "OnnxComparison"
    seconds: float

    def lines(self) -> list[str]:
        """Lines for the terminal."""
        comparison = self.comparison
        reached = f", reaching {comparison.experts}" if comparison.experts else ""
        flipped = f", {comparison.beyond} of them by a router's near tie" if comparison.beyond else ""
        return [
            f"wrote {self.folder}: {self.num_bytes / GIB:.2f} GiB in {self.seconds:.1f} s",
            f"verified in ONNX Runtime against transformers: {comparison.compared}{reached}, "
            f"largest difference {comparison.largest:.1e} of the largest logit "
            f"(tolerance {comparison.tolerance:g}){flipped}",
        ]


def export_onnx(source: Path, out: Path, *, dtype: str, with_cache: bool, base: Path | None = None) -> OnnxExportResult:
    """Write the language model or classifier of `source` to `out` as model.onnx, with tokenizer and config beside it.

    `source` is a Hugging Face folder, or another folder that `export_checkpoint` reads: it is exported to a temporary
    folder beside `out` first, with `base`. `dtype` is a key of `ONNX_DTYPES`.

    ExportError where the model has no ONNX graph or a package is missing; ModelError where the weights do not fit;
    OutputError where `out` is not empty or larger than the free space of the disk; VerificationError where ONNX
    Runtime differs from plain transformers, and then the folder stays as `out`.unverified.
    """
    began = time.monotonic()
    check_packages()
    if dtype not in ONNX_DTYPES:
        raise ExportError(
            f"ONNX Runtime cannot run a model in {dtype} on a CPU", hint="export with --dtype fp32 or fp16"
        )
    check_out_empty(out)
    with _hub_folder(source, out, base) as folder:
        comparison = _write_and_compare(folder, out, dtype, with_cache)
    size = sum(file.stat().st_size for file in out.iterdir())
    return OnnxExportResult(out, size, comparison, time.monotonic() - began)


def check_packages() -> None:
    """Raise ExportError, which names them, where packages of the onnx extra are not installed."""
    absent = [name for name in _PACKAGES if find_spec(name) is None]
    if absent:
        raise ExportError(f"the ONNX export needs {' and '.join(absent)}", hint="pip install 'ds_finetune[onnx]'")


@contextmanager
def _hub_folder(source: Path, out: Path, base: Path | None) -> Iterator[Path]:
    """`source` itself where it is a Hugging Face folder, else a temporary folder that it is exported to."""
    if is_model(source) and not is_peft_adapter(source):
        if base is not None:
            raise ExportError(
                f"--base {base} is not valid with the Hugging Face folder {source}",
                hint="leave it out: the folder has a config.json",
            )
        yield source
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as scratch:
        yield export_checkpoint(
            source, Path(scratch) / "hub", dtype="fp32", max_shard_bytes=_SHARD_BYTES, base=base
        ).folder


def _write_and_compare(folder: Path, out: Path, dtype: str, with_cache: bool) -> "OnnxComparison":
    from ds_finetune.export.onnx.record import OnnxRecord, compare_with, reference_of

    unverified = out.with_name(out.name + ".unverified")
    model = _meta_model(folder)
    with _new_folder(unverified):
        _write_graph(model, folder, unverified, dtype, with_cache)
        reference = reference_of(folder)
        comparison = compare_with(unverified, reference)
        versions = {name: version(name) for name in (*_PACKAGES, "torch", "transformers")}
        about = {
            "dtype": dtype,
            "cache": with_cache and not is_classifier(model.config),
            **asdict(comparison),
            "versions": versions,
        }
        if comparison.failures:
            (unverified / UNVERIFIED).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        else:
            OnnxRecord.of(unverified, reference, about).write(unverified)
    if comparison.failures:
        raise VerificationError(
            f"ONNX Runtime differs from transformers, with a tolerance of {comparison.tolerance:g} of the largest "
            f"logit: {'; '.join(comparison.failures)}",
            hint=f"do not serve {unverified}, which was kept for inspection; "
            f"{'try --dtype fp32' if dtype == 'fp16' else 'please report this'}",
        )
    if out.is_dir():
        out.rmdir()
    unverified.rename(out)
    return comparison


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Create `folder`, and remove it after an error; OutputError where it cannot be written."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
            raise OutputError(
                f"{folder} cannot be written: {error.strerror}", hint="name a folder on a disk with room"
            ) from error
        raise


def _meta_model(folder: Path) -> PreTrainedModel:
    """The model of `folder` on the meta device, without code of the folder; ExportError where it has no graph."""
    from ds_finetune.export.onnx.decoder import check_config
    from ds_finetune.export.onnx.encoders import check_encoder_config

    check_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as unknown:
        raise ExportError(
            f"{folder}/config.json: {str(unknown).splitlines()[0]}",
            hint="name the folder of a causal LM or a classifier",
        ) from unknown
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        raise ExportError(f"{folder} is quantized ({quantized.get('quant_method')})", hint=_PLAIN_COPY)
    is_encoder = is_classifier(config) and family_of(config.model_type).encoder is not None
    (check_encoder_config if is_encoder else check_config)(config)
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False)
    return model


def _write_graph(model: PreTrainedModel, folder: Path, out: Path, dtype: str, with_cache: bool) -> None:
    import numpy as np

    from ds_finetune.export.onnx.decoder import decoder_graph, scoring_graph
    from ds_finetune.export.onnx.encoders import encoder_graph
    from ds_finetune.export.onnx.graph import write_model

    hub = open_weights(model, folder, family=family_of(model.config.model_type))
    if hub.has_fp8:
        raise ExportError(f"{folder} holds FP8 tensors and its config.json does not say so", hint=_PLAIN_COPY)
    numbers = np.dtype(ONNX_DTYPES[dtype])
    if is_classifier(model.config):
        build = encoder_graph if family_of(model.config.model_type).encoder else scoring_graph
        graph, ends = build(model, hub.whole, dtype=numbers)
    else:
        graph, ends = decoder_graph(model, hub.whole, dtype=numbers, with_cache=with_cache)
    check_free_space(out, sum(weight.num_bytes for weight in graph.weights.values()))
    write_model(graph, ends, out, inline_bytes=INLINE_BYTES)
    for name in ("config.json", *COPIED_FILES):
        if (folder / name).is_file():
            copy_model_file(folder / name, out / name)
    remove_code(out)

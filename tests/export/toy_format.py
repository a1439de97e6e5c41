"""An export format of another package: one archive of numpy, with the configuration and the tokenizer beside it."""

import hashlib
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ds_finetune.errors import ExportError
from ds_finetune.export.formats import ExportFormat, ExportOptions, ExportResult, Scorer
from ds_finetune.export.from_checkpoint import beside_weights, export_checkpoint
from ds_finetune.export.output_folder import RECORD, check_out_empty, replaced_folder
from ds_finetune.export.verify.verify import VerificationResult, mark_folder

TOY = ExportFormat(
    name="toy",
    title="toy",
    module=__name__,
    weights=("weights.npz",),
    read_by="numpy",
    uses=("python -c 'import numpy; numpy.load(\"OUT/weights.npz\")'",),
    dtypes=("fp32",),
    engines=("transformers",),
    packages=("numpy",),
    has_family=lambda family: family.encoder is None,
)


def write(source: Path, out: Path, options: ExportOptions) -> ExportResult:
    began = time.monotonic()
    check_out_empty(out)
    with tempfile.TemporaryDirectory() as scratch, replaced_folder(out) as partial:
        hub = Path(scratch) / "hub"
        export_checkpoint(source, hub, dtype=options.dtype, max_shard_bytes=10**10, base=options.base)
        tensors = {key: tensor.numpy() for key, tensor in load_file(hub / "model.safetensors").items()}
        np.savez(partial / "weights.npz", **tensors)
        for file in (hub / "config.json", *beside_weights((hub,))):
            (partial / file.name).write_bytes(file.read_bytes())
        (partial / RECORD).write_text(json.dumps({"format": "toy 1", "sum": _digest(partial)}))
    size = (out / "weights.npz").stat().st_size
    return ExportResult(folder=out, num_tensors=len(tensors), num_bytes=size, seconds=time.monotonic() - began)


def verify(folder: Path, base: Path | None) -> VerificationResult:
    is_same = json.loads((folder / RECORD).read_text())["sum"] == _digest(folder)
    result = VerificationResult(
        folder, () if is_same else ("weights.npz has other bytes",), ("the bytes of the archive",)
    )
    mark_folder(result)
    return result


def check_model(
    config: PretrainedConfig, *, is_classifier: bool, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    TOY.check_model_type(config.model_type)
    if is_classifier:
        raise ExportError(f"model_type {config.model_type} is a classifier", hint="export it as safetensors")


def load_model(folder: Path, device: str) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as hub, np.load(folder / "weights.npz") as weights:
        save_file({key: torch.from_numpy(weights[key]) for key in weights}, Path(hub) / "model.safetensors")
        (Path(hub) / "config.json").write_bytes((folder / "config.json").read_bytes())
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(hub).eval()
    return model


def load_scorer(folder: Path) -> Scorer:
    raise ExportError(f"{folder} holds no classifier", hint="export it as safetensors")


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "weights.npz").read_bytes()).hexdigest()

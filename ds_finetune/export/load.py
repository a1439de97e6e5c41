"""Load an exported folder, of safetensors or ONNX, as a model that generates or classifies."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ds_finetune.console.quiet import show_loading_as_phase
from ds_finetune.errors import ExportError
from ds_finetune.export.classifiers import holds_classifier
from ds_finetune.export.onnx.folder import check_packages
from ds_finetune.export.verify.record import is_onnx
from ds_finetune.foreign.auto_models import AutoModelForCausalLM, AutoModelForSequenceClassification
from ds_finetune.model.build.hub_folder import check_folder

_HINT = "name an exported folder, e.g. runs/r1/export"


def load_exported(folder: Path) -> PreTrainedModel:
    """The causal LM of `folder`: by plain transformers, on a GPU where there is one, or by ONNX Runtime on the CPU.

    ExportError where the folder holds no config.json or no weights, or a classifier, and where the ONNX packages are
    not installed.
    """
    check_generates(folder)
    if is_onnx(folder):
        check_packages()
        from ds_finetune.export.onnx.runtime import OnnxCausalLM

        return OnnxCausalLM.from_pretrained(folder)
    show_loading_as_phase()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False).eval()
    return model.cuda() if torch.cuda.is_available() else model


Scorer = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""From inputs of a tokenizer, int64 [rows, tokens], to logits fp32 [rows, labels] on the CPU."""


def load_scorer(folder: Path) -> Scorer:
    """The classifier of `folder`: by plain transformers, on a GPU where there is one, or by ONNX Runtime on the CPU.

    ExportError where the folder holds no weights, and where the ONNX packages are not installed.
    """
    check_loadable(folder)
    if is_onnx(folder):
        check_packages()
        from ds_finetune.export.onnx.scores import OnnxScorer

        runtime = OnnxScorer(folder)
        return lambda inputs: torch.from_numpy(runtime.logits({key: part.numpy() for key, part in inputs.items()}))
    show_loading_as_phase()
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto", trust_remote_code=False).eval()
    model = model.cuda() if torch.cuda.is_available() else model

    def score(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(**{key: part.to(model.device) for key, part in inputs.items()}).logits
        return logits.float().cpu()

    return score


def check_generates(folder: Path) -> None:
    """ExportError where `folder` holds no model that can be loaded, or a classifier, which generates no text."""
    if folder.is_dir():
        check_folder(folder)
    check_loadable(folder)
    if holds_classifier(folder):
        names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        raise ExportError(
            f"`{folder}` holds a {names[0]}, which scores texts and generates none",
            hint="`ds-finetune ask` prints the classes of texts, `ds-finetune eval` scores it on held-out rows",
        )


def check_loadable(folder: Path) -> None:
    """ExportError where `folder` holds no config.json or no weights that transformers or ONNX Runtime load."""
    if not (folder / "config.json").is_file():
        raise ExportError(f"`{folder}` holds no config.json", hint=_HINT)
    if not is_onnx(folder) and not any(any(folder.glob(kind)) for kind in ("*.safetensors", "*.bin")):
        raise ExportError(f"`{folder}` holds a config.json and no weights", hint=_HINT)

"""The export format `safetensors`: Hugging Face folders, which transformers and its servers read."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ds_finetune.config.units import parse_bytes
from ds_finetune.console.quiet import show_loading_as_phase
from ds_finetune.export.formats import ExportOptions, ExportResult, Scorer
from ds_finetune.export.from_checkpoint import export_checkpoint
from ds_finetune.export.load import auto_class
from ds_finetune.export.verify.verify import VerificationResult, verify_exports
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.foreign.auto_models import AutoModelForSequenceClassification
from ds_finetune.system.free_memory import available_bytes


def write(source: Path, out: Path, options: ExportOptions) -> ExportResult:
    """Convert `source` to the Hugging Face folder `out`. The folder is not verified."""
    max_shard_bytes = parse_bytes(options.max_shard_size or "5GB", name="--max-shard-size")
    return export_checkpoint(source, out, dtype=options.dtype, max_shard_bytes=max_shard_bytes, base=options.base)


def verify(folder: Path, base: Path | None) -> VerificationResult:
    """Load an exported folder with plain transformers in a new process, compare it with its record, and mark it."""
    return verify_exports([folder], base=base, available_bytes=available_bytes())[0]


def check_model(
    config: PretrainedConfig, *, is_classifier: bool, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Do nothing, because every model that can be trained can be exported to safetensors."""


def load_model(folder: Path, device: str) -> PreTrainedModel:
    """Load the text-generating model in `folder`. An empty `device` means a GPU if there is one."""
    show_loading_as_phase()
    placed = {"device_map": device} if device else {}
    factory = auto_class(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model: PreTrainedModel = factory.from_pretrained(folder, dtype="auto", trust_remote_code=False, **placed).eval()
    return model.cuda() if not device and torch.cuda.is_available() else model


def load_scorer(folder: Path) -> Scorer:
    """Load the classifier of `folder`, on a GPU if there is one, as a function from token ids to logits."""
    show_loading_as_phase()
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto", trust_remote_code=False).eval()
    model = model.cuda() if torch.cuda.is_available() else model

    def score(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(**{key: part.to(model.device) for key, part in inputs.items()}).logits
        return logits.float().cpu()

    return score

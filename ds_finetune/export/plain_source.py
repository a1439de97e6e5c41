"""Opens the Hugging Face folder from which formats other than safetensors are made, and its model without weights."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ds_finetune.errors import ExportError
from ds_finetune.export.fitted_tokenizer import fit_folder
from ds_finetune.export.from_checkpoint import beside_weights, export_checkpoint
from ds_finetune.export.load import auto_class
from ds_finetune.export.model_config import CODE, write_files
from ds_finetune.export.readers.sources import is_model, is_peft_adapter
from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.hub_folder import HubFolder, check_folder
from ds_finetune.model.loss.score_config import is_classifier
from ds_finetune.model.weights.load import open_weights

SHARD_BYTES = 5 * 10**9
"""Default limit of the size of one safetensors file, in bytes."""
_PLAIN_COPY = "first make a bf16 copy of the model; for a model in FP8 blocks with `ds-finetune export SOURCE COPY`"


@contextmanager
def plain_folder(source: Path, out: Path, base: Path | None) -> Iterator[Path]:
    """Context with `source` as a Hugging Face folder; other sources are exported to a temporary folder beside `out`."""
    if is_model(source) and not is_peft_adapter(source):
        if base is not None:
            raise ExportError(
                f"--base {base} is not valid with the Hugging Face folder {source}",
                hint="leave --base out: the folder has a config.json of its own",
            )
        yield source
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as scratch:
        hub = Path(scratch) / "hub"
        yield export_checkpoint(source, hub, dtype="fp32", max_shard_bytes=SHARD_BYTES, base=base).folder


def plain_model(folder: Path, check_model: Callable[..., None]) -> tuple[PreTrainedModel, HubFolder]:
    """Open the model of `folder` on the meta device, and its weights. Code in the folder is not run. ExportError if the
    model type is unknown or the weights are quantised; ModelError if the weights do not fit the model; also errors of
    the format's `check_model`.
    """
    check_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as unknown:
        raise ExportError(
            f"transformers cannot read {folder}/config.json: {str(unknown).splitlines()[0]}",
            hint="name the folder of a causal LM or a classifier",
        ) from unknown
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        raise ExportError(f"the model in {folder} is quantised ({quantized.get('quant_method')})", hint=_PLAIN_COPY)
    check_model(config, is_classifier=is_classifier(config))
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False)
    hub = open_weights(model, folder, family=family_of(config.model_type))
    if hub.has_fp8:
        raise ExportError(f"{folder} has FP8 tensors, but no quantization_config in config.json", hint=_PLAIN_COPY)
    return model, hub


def copy_settings(folder: Path, out: Path) -> None:
    """Copy configuration and tokenizer files of `folder` to `out`, without keys that name Python code. The copied
    tokenizer puts the same special tokens before a text as training does.
    """
    files = beside_weights((folder,))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fitted = fit_folder(files, config)
    texts = fitted[1] if fitted else {}
    if config.pop(CODE, None) is not None:
        texts = {**texts, "config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n"}
    write_files(out, [folder / "config.json", *files], texts)

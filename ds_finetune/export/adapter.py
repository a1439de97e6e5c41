"""Writes LoRA adapters in peft's format.

A module of fused experts has two weights, gate_up_proj and down_proj, each [experts, out, in]. peft 0.21 stores the
adapter of such a weight as A [rank x experts, in] and B [out, rank x experts]: expert e has the rows from e x rank to
(e + 1) x rank of A, and the columns e, e + experts, e + 2 x experts, ... of B (tuners/lora/layer.py, get_delta_weight).
peft nests the two adapters of the module and names the first one `base_layer` (_inject_parameters).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from ds_finetune.config.sections import LoraConfig
from ds_finetune.export.model_config import write_files
from ds_finetune.export.output_folder import as_output_errors, replaced_folder
from ds_finetune.families.family import Family
from ds_finetune.model.adapters.lora import Factors
from ds_finetune.model.adapters.peft_adapter import BASE_DIGEST, CONFIG, DOWN, GATE_UP, KEY_PREFIX, WEIGHTS
from ds_finetune.plan.lora_targets import is_peft_parameter


@dataclass(frozen=True, kw_only=True)
class AdapterBase:
    """The base model of LoRA adapters, and the contents of the adapters' folder besides the adapters."""

    name: str
    digest: str
    family: Family
    module: str = "model"
    """Attribute of transformers' model class that has the text model. Models with images or sound have another one."""
    trained: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Fully trained weights by name, such as the head of a classifier."""
    classifier_config: Mapping[str, Any] = field(default_factory=dict)
    """The config.json of a classifier, which has the names of its classes; empty for other models."""
    files: Sequence[Path] = ()
    """Tokenizer and generation files of the adapter; chat template and end tokens may differ from the base's."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Further files of the adapter's folder as text, by name. They replace files of the same name in `files`."""


def write_adapter(factors: Mapping[str, Factors], lora: LoraConfig, out: Path, base: AdapterBase) -> None:
    """Write LoRA adapters to the folder `out`, which appears only when complete. The keys of `factors` are the names of
    the adapted weights. OutputError if the disk is full; the incomplete folder is then removed.
    """
    factors = {re.sub(r"^model\.", f"{base.module}.", name): adapter for name, adapter in factors.items()}
    with replaced_folder(out) as partial, as_output_errors(partial):
        tensors = {key: tensor for name, adapter in factors.items() for key, tensor in _peft_tensors(name, adapter)}
        tensors |= {KEY_PREFIX + name: tensor.contiguous() for name, tensor in base.trained.items()}
        write_weights(tensors, partial, base.digest)
        parameters = [name for name in factors if is_peft_parameter(name, base.family)]
        config = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if base.classifier_config else "CAUSAL_LM",
            "base_model_name_or_path": base.name,
            "r": lora.rank,
            "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
            "use_rslora": lora.rslora,
            "lora_dropout": lora.dropout,
            "bias": "none",
            "inference_mode": True,
            "modules_to_save": sorted({name.rpartition(".")[0] for name in base.trained}) or None,
            "target_modules": [name.removesuffix(".weight") for name in factors if name not in parameters],
            "target_parameters": parameters,
        }
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if base.classifier_config:
            text = json.dumps(base.classifier_config, indent=2, ensure_ascii=False)
            (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        write_files(partial, base.files, base.texts)


def write_weights(tensors: dict[str, torch.Tensor], folder: Path, base_digest: str) -> None:
    """Write tensors to adapter_model.safetensors in `folder`. OSError if the disk is full. safetensors' own `save_file`
    is not used, because it makes a file that only its owner can read.
    """
    (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt", BASE_DIGEST: base_digest}))


def _peft_tensors(name: str, adapter: Factors) -> list[tuple[str, torch.Tensor]]:
    module, _, leaf = name.rpartition(".")
    key = f"{KEY_PREFIX}{module}{'.base_layer' if leaf == GATE_UP else ''}"
    a, b = adapter.a, adapter.b
    is_fused = leaf in (DOWN, GATE_UP)
    a = a.reshape(-1, a.shape[-1]) if is_fused else a
    b = b.permute(1, 2, 0).reshape(b.shape[1], -1) if is_fused else b
    return [(f"{key}.lora_A.weight", a.contiguous()), (f"{key}.lora_B.weight", b.contiguous())]

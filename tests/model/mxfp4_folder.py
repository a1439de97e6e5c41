"""Tiny folders as gpt-oss is published, with experts in MXFP4."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model.fp8_folder import publish

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_bias": True,
    "max_position_embeddings": 256,
    "initial_context_length": 64,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
}
"""A config.json with the keys of the published one (openai/gpt-oss-20b)."""
EXPERTS = ("gate_up_proj", "down_proj")


def random_parts(experts: int, outputs: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [experts, outputs, groups, 16] of random bytes, and scales of about 1/256 as weights have them."""
    blocks = torch.randint(256, (experts, outputs, groups, 16), dtype=torch.uint8)
    return blocks, torch.randint(117, 121, (experts, outputs, groups), dtype=torch.uint8)


def plain_tensors(**changes: Any) -> dict[str, torch.Tensor]:
    """Tensors of a model with random weights by their published names, in bf16."""
    torch.manual_seed(4)
    config = AutoConfig.for_model(**{k: v for k, v in GPT_OSS.items() if k != "quantization_config"} | changes)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for param in model.parameters():
            # The initial sinks and biases are zero or small.
            param.add_(torch.randn_like(param) * 0.1)
    return {name: tensor.bfloat16().clone() for name, tensor in model.state_dict().items()}


def in_mxfp4(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same names with experts in MXFP4, of random numbers."""
    torch.manual_seed(6)
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(EXPERTS):
            experts, inputs, outputs = tensor.shape
            parts = random_parts(experts, outputs, inputs // 32)
            out |= {name + "_blocks": parts[0], name + "_scales": parts[1]}
        else:
            out[name] = tensor
    return out


def publish_gpt_oss(folder: Path, **changes: Any) -> Path:
    """A folder as published, in three files."""
    return publish(folder, in_mxfp4(plain_tensors(**changes)), config=GPT_OSS | changes)

"""Tiny folders as DeepSeek-V3 publishes them, in FP8 blocks with a multi-token prediction layer, and plain decoding of
them in numpy.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 160,
    "intermediate_size": 300,
    "moe_intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 130,
    "q_lora_rank": 136,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 34,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "torch_dtype": "bfloat16",
}
"""A config.json with the keys of the published one; no width is a multiple of 128, and `kv_a_proj_with_mqa` has 138
rows.
"""
MTP = 2
"""Number of the multi-token prediction layer, as published past the last one."""
TABLE = np.array(
    [
        (-1.0 if byte & 0x80 else 1.0)
        * (
            math.nan
            if byte & 0x7F == 0x7F
            else (byte & 7) / 8 * 2.0**-6
            if not byte & 0x78
            else (1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3 & 15) - 7)
        )
        for byte in range(256)
    ],
    dtype=np.float32,
)
"""The number each byte is in E4M3: sign, four bits of exponent with bias 7, three of mantissa; no infinity (arXiv
2209.05433).
"""


def decoded(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Plain numpy: each number by table, times its block's scale, in fp32."""
    values = TABLE[weight.view(torch.uint8).numpy()]
    spread = np.repeat(np.repeat(scale.float().numpy(), 128, axis=0), 128, axis=1)[: values.shape[0], : values.shape[1]]
    return torch.from_numpy(values * spread)


def coded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain loops: a block's scale is its largest magnitude / 448, its numbers the nearest E4M3 to the quotients."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            scale[i, j] = weight[block].float().abs().max() / 448
            out[block] = (weight[block].float() / scale[i, j]).to(torch.float8_e4m3fn)
    return out, scale


def is_published_in_fp8(key: str) -> bool:
    """Linear weights of attention and MLPs, by the names in DeepSeek-V3's index."""
    return re.search(r"\.((q_a|q_b|kv_b|o|gate|up|down)_proj|kv_a_proj_with_mqa)\.weight$", key) is not None


def master(**changes: Any) -> dict[str, torch.Tensor]:
    """The weights before they are quantised, by published name: bf16, the router's bias fp32, with the prediction
    layer.
    """
    torch.manual_seed(3)
    plain = {key: value for key, value in V3.items() if key != "quantization_config"}
    config = AutoConfig.for_model(**plain | {"num_hidden_layers": MTP + 1} | changes)
    model = AutoModelForCausalLM.from_config(config).float()
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            state[name] = torch.linspace(-0.2, 0.2, len(tensor))
        elif name.endswith("mlp.experts.gate_up_proj"):
            for e, (gate, up) in enumerate(part.chunk(2) for part in tensor):
                state |= {
                    name.replace("gate_up_proj", f"{e}.gate_proj.weight"): gate,
                    name.replace("gate_up_proj", f"{e}.up_proj.weight"): up,
                }
        elif name.endswith("mlp.experts.down_proj"):
            state |= {name.replace("down_proj", f"{e}.down_proj.weight"): part for e, part in enumerate(tensor)}
        else:
            state[name] = tensor
    layer, hidden = f"model.layers.{MTP}", config.hidden_size
    state |= {f"{layer}.{norm}.weight": torch.rand(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    state |= {f"{layer}.eh_proj.weight": torch.randn(hidden, 2 * hidden) / 10}
    state |= {
        f"{layer}.embed_tokens.weight": state["model.embed_tokens.weight"],
        f"{layer}.shared_head.head.weight": state["lm_head.weight"],
    }
    return {
        key: (tensor if key.endswith("bias") else tensor.bfloat16()).clone().contiguous()
        for key, tensor in state.items()
    }


def publish(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, shards: int = 3, config: Mapping[str, Any] = V3
) -> Path:
    """`tensors` in `shards` files with an index, written by safetensors itself."""
    folder.mkdir(parents=True)
    keys = sorted(tensors)
    weight_map = {key: f"model-{i % shards + 1:05d}-of-{shards:06d}.safetensors" for i, key in enumerate(keys)}
    for file in set(weight_map.values()):
        save_file(
            {key: tensors[key] for key in keys if weight_map[key] == file}, folder / file, metadata={"format": "pt"}
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def in_fp8(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as published: linear weights in FP8 with their scales, the others as they are."""
    out: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        out |= (
            dict(zip((key, key + "_scale_inv"), coded(tensor), strict=True))
            if is_published_in_fp8(key)
            else {key: tensor}
        )
    return out


def with_other_scales(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same bytes under scales that no bf16 weight gave, as of a model whose masters were fp32."""
    torch.manual_seed(5)
    return {
        key: tensor * (1 + torch.rand_like(tensor) / 3) if key.endswith("_scale_inv") else tensor
        for key, tensor in tensors.items()
    }


def dequantised(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The plain weights of a published folder in `dtype`; the router's bias stays fp32."""
    kept = {key: tensor for key, tensor in tensors.items() if not key.endswith("_scale_inv")}
    plain = {
        key: decoded(t, tensors[key + "_scale_inv"]) if t.dtype == torch.float8_e4m3fn else t for key, t in kept.items()
    }
    return {key: tensor.float() if key.endswith("bias") else tensor.to(dtype) for key, tensor in plain.items()}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, by safetensors itself."""
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}

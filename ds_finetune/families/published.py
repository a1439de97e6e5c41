"""Sizes of published models of the families, from their config.json files, for tables of what they need."""

from collections.abc import Mapping
from typing import Any

_LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_V3: dict[str, Any] = {
    **_LATENT,
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}
_LITE: dict[str, Any] = {
    **_LATENT,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}


def _dense(model_type: str, *sizes: int, **others: int) -> dict[str, Any]:
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return {"model_type": model_type, **dict(zip(keys, sizes, strict=True)), **others}


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "DeepSeek-V3, R1, V3.1": _V3,
    "DeepSeek-V2-Lite": {**_LITE, "model_type": "deepseek_v2", "intermediate_size": 10944},
    "Moonlight-16B-A3B": {**_LITE, "model_type": "deepseek_v3", "intermediate_size": 11264},
    "Kimi-K2": {**_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384}
    | {"first_k_dense_replace": 1},
    "GLM-4.5-Air": _dense("glm4_moe", 4096, 46, 96, 8, 10944, head_dim=128, moe_intermediate_size=1408)
    | {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "GLM-4.7-Flash": {
        **_LATENT,
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
    },
    "gpt-oss-20b": _dense("gpt_oss", 2880, 24, 64, 8, 2880, head_dim=64, num_local_experts=32, num_experts_per_tok=4),
    "Mixtral-8x7B": _dense("mixtral", 4096, 32, 32, 8, 14336, num_local_experts=8, num_experts_per_tok=2),
    "OLMoE-1B-7B": _dense("olmoe", 2048, 16, 16, 16, 1024, num_experts=64, num_experts_per_tok=8),
    "Qwen3-30B-A3B": _dense("qwen3_moe", 2048, 48, 32, 4, 6144, head_dim=128, moe_intermediate_size=768)
    | {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "Qwen3-8B": _dense("qwen3", 4096, 36, 32, 8, 12288, head_dim=128),
    "R1-Distill-Qwen-7B": _dense("qwen2", 3584, 28, 28, 4, 18944),
    "R1-Distill-Llama-8B": _dense("llama", 4096, 32, 32, 8, 14336),
}
"""Keys of config.json that memory depends on, by the name of a model."""

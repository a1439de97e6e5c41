"""Tiny configurations of every family of the table."""

from typing import Any

_DENSE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA = _DENSE | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 16,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _MLA | {"topk_method": "greedy", "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v3": _MLA | {"n_group": 2, "topk_group": 1},
    "qwen2": _DENSE | {"tie_word_embeddings": True},
    "qwen3": _DENSE | {"head_dim": 8},
    "qwen3_moe": _DENSE
    | {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "llama": _DENSE,
}

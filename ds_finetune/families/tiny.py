"""Tiny configurations of the model families, for tests and the selftest."""

from typing import Any

VOCAB = 96
"""Tokens of their vocabularies."""

DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
"""Grouped-query attention and dense MLPs."""
LATENT: dict[str, Any] = {
    **DENSE,
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
"""Multi-head latent attention and, after the first layer, routed experts."""
GPT_OSS: dict[str, Any] = {
    **DENSE,
    "intermediate_size": 16,
    "head_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "attention_bias": True,
    "swiglu_limit": 1.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
"""Attention sinks, a window in every other layer, and biased experts, whose limit some numbers reach."""
QWEN3_MOE: dict[str, Any] = {
    **DENSE,
    "head_dim": 12,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
"""Grouped-query attention and, after the first layer, routed experts."""
MIXTRAL: dict[str, Any] = {**DENSE, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
"""Grouped-query attention and routed experts in every layer."""
OLMOE: dict[str, Any] = {
    **DENSE,
    "intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
}
"""The same, with queries and keys normalised over all heads, and weights of experts that do not sum to one."""
GROUPED_ROUTING: dict[str, Any] = {**LATENT, "n_group": 2, "topk_group": 1}
"""The same, with experts chosen from some groups only."""
INDEXED: dict[str, Any] = {**GROUPED_ROUTING, "index_topk": 32, "index_n_heads": 2, "index_head_dim": 16}
"""DeepSeek sparse attention beside it: no document of the samples is longer than `index_topk`, but some rows are."""
SPARSE: dict[str, Any] = {"index_topk": 6, "index_n_heads": 16}
"""Changes after which most documents of the samples are longer than `index_topk`, and scores of tokens differ: with few
heads many are 0, and among equal ones torch chooses by the length of the row.
"""
SHARED_INDEX: dict[str, Any] = {
    **INDEXED,
    "n_group": 1,
    "v_head_dim": 24,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 1,
}
"""The same with one group of experts, and an indexer in every other layer."""
ONE_GROUP: dict[str, Any] = {**LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
"""The same, with experts chosen from all, as by Moonlight and Kimi K2."""
WIDE_VALUES: dict[str, Any] = {**ONE_GROUP, "v_head_dim": 24, "routed_scaling_factor": 1.8}
"""The same, with values as wide as queries and keys, as in GLM-4.7-Flash."""
GROUPED_QUERY_EXPERTS: dict[str, Any] = {
    **DENSE,
    "head_dim": 12,
    "attention_bias": True,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""Grouped-query attention with biases and, after the first layer, routed experts, as in GLM-4.5-Air."""

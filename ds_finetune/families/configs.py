"""Configurations of the families: tiny ones for tests and the selftest, and sizes of published models for tables."""

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]
VOCAB = 96
"""Tokens of the vocabularies of tiny models."""

DENSE: Config = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
DENSE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
DENSE |= {"tie_word_embeddings": False, "initializer_range": 0.1}
"""Grouped-query attention and dense MLPs."""
_EXPERTS: Config = {"moe_intermediate_size": 16, "n_shared_experts": 1, "n_routed_experts": 8}
_EXPERTS |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
"""After the first layer, routed experts."""
LATENT: Config = {**DENSE, **_EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 16}
"""Multi-head latent attention and, after the first layer, routed experts."""
_YARN: Config = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"truncate": False, "original_max_position_embeddings": 32}
GPT_OSS: Config = {**DENSE, "intermediate_size": 16, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
GPT_OSS |= {"sliding_window": 5, "attention_bias": True, "swiglu_limit": 1.0, "rope_parameters": _YARN}
"""Attention sinks, a window in every other layer, and biased experts, whose limit some numbers reach."""
COMPRESSED: Config = {**DENSE, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 24}
COMPRESSED |= {"intermediate_size": 16, "moe_intermediate_size": 16, "n_shared_experts": 1}
COMPRESSED |= {"n_routed_experts": 8, "num_experts_per_tok": 2}
COMPRESSED |= {"qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 8, "sliding_window": 5, "swiglu_limit": 1.25}
COMPRESSED |= {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16, "hc_sinkhorn_iters": 4}
COMPRESSED |= {"num_hash_layers": 1, "rope_scaling": {**_YARN, "type": "yarn"}}
COMPRESSED |= {"compress_ratios": [0, 4, 128, 4], "compress_rate_hca": 12}
"""A window in each layer, and in some layers entries of compressed tokens, whose rotary embedding is scaled. The first
layer chooses experts by token ids.
"""
HASHED: Config = {"num_hidden_layers": 5, "compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 4}
"""Changes after which later stages of a pipeline have such a layer too."""
QWEN3_MOE: Config = {**DENSE, "head_dim": 12, "moe_intermediate_size": 16, "num_experts": 8}
QWEN3_MOE |= {"num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0]}
"""Grouped-query attention and, after the first layer, routed experts."""
MIXTRAL: Config = {**DENSE, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
"""Grouped-query attention and routed experts in every layer."""
OLMOE: Config = {**DENSE, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": None}
"""Experts in every layer, queries and keys normalised over all heads, and weights of experts that do not sum to one."""
GROUPED_ROUTING: Config = {**LATENT, "n_group": 2, "topk_group": 1}
"""Latent attention, and experts chosen from some groups only."""
INDEXED: Config = {**GROUPED_ROUTING, "index_topk": 32, "index_n_heads": 2, "index_head_dim": 16}
"""DeepSeek sparse attention beside it: no document of the samples is longer than `index_topk`, but some rows are."""
SPARSE: Config = {"index_topk": 6, "index_n_heads": 16}
"""Changes after which most documents of the samples are longer than `index_topk`, and scores of tokens differ: with few
heads many are 0, and among equal ones torch chooses by the length of the row.
"""
SHARED_INDEX: Config = {**INDEXED, "n_group": 1, "v_head_dim": 24, "index_topk_freq": 2, "index_skip_topk_offset": 1}
"""DeepSeek sparse attention with one group of experts, and an indexer in every other layer."""
ONE_GROUP: Config = {**LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
"""Latent attention, and experts chosen from all, as by Moonlight and Kimi K2."""
WIDE_VALUES: Config = {**ONE_GROUP, "v_head_dim": 24, "routed_scaling_factor": 1.8}
"""Experts chosen from all, and values as wide as queries and keys, as in GLM-4.7-Flash."""
GROUPED_QUERY_EXPERTS: Config = {**DENSE, **_EXPERTS, "head_dim": 12, "attention_bias": True}
GROUPED_QUERY_EXPERTS |= {"n_group": 1, "topk_group": 1}
"""Grouped-query attention with biases and, after the first layer, routed experts, as in GLM-4.5-Air."""

_WIDTHS: Config = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_V3: Config = {**_WIDTHS, "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61}
_V3 |= {"num_attention_heads": 128, "q_lora_rank": 1536, "intermediate_size": 18432, "moe_intermediate_size": 2048}
_V3 |= {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3}
_LITE: Config = {**_WIDTHS, "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16}
_LITE |= {"q_lora_rank": None, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6}
_LITE |= {"n_shared_experts": 2, "first_k_dense_replace": 1}
_FLASH: Config = {**_WIDTHS, "model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 47}
_FLASH |= {"num_attention_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
_FLASH |= {"intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64}
_FLASH |= {"num_experts_per_tok": 4, "n_shared_experts": 1}
_V4: Config = {"model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64}
_V4 |= {"num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024}
_V4 |= {"o_groups": 8, "sliding_window": 128, "compress_ratios": [0, 0, *[4, 128] * 20, 4], "index_topk": 512}
_V4 |= {"index_n_heads": 64, "index_head_dim": 128, "hc_mult": 4, "moe_intermediate_size": 2048, "swiglu_limit": 10.0}
_V4 |= {"n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1, "num_hash_layers": 3}


def _dense(model_type: str, *sizes: int, **others: int) -> Config:
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return {"model_type": model_type, **dict(zip(keys, sizes, strict=True)), **others}


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "DeepSeek-V3, R1, V3.1": _V3,
    "DeepSeek-V4-Flash": _V4,
    "DeepSeek-V2-Lite": {**_LITE, "model_type": "deepseek_v2", "intermediate_size": 10944},
    "Moonlight-16B-A3B": {**_LITE, "model_type": "deepseek_v3", "intermediate_size": 11264},
    "Kimi-K2": {**_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384}
    | {"first_k_dense_replace": 1},
    "GLM-4.5-Air": _dense("glm4_moe", 4096, 46, 96, 8, 10944, head_dim=128, moe_intermediate_size=1408)
    | {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "GLM-4.7-Flash": _FLASH,
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

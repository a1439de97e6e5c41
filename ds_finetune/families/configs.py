"""Configurations of tiny models with the layers of real model families, for tests and `ds-finetune selftest`."""

from typing import Any

Config = dict[str, Any]
VOCAB = 96
"""Vocabulary size of the tiny models."""

DENSE: Config = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
DENSE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
DENSE |= {"tie_word_embeddings": False, "initializer_range": 0.1}
"""Grouped-query attention and dense MLPs."""
_EXPERTS: Config = {"moe_intermediate_size": 16, "n_shared_experts": 1, "n_routed_experts": 8}
_EXPERTS |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
"""Routed experts in all layers after the first."""
LATENT: Config = {**DENSE, **_EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 16}
"""Multi-head latent attention, and routed experts in all layers after the first."""
_YARN: Config = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"truncate": False, "original_max_position_embeddings": 32}
GPT_OSS: Config = {**DENSE, "intermediate_size": 16, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
GPT_OSS |= {"sliding_window": 5, "attention_bias": True, "swiglu_limit": 1.0, "rope_parameters": _YARN}
"""Attention sinks, a sliding window in every other layer, and biased experts whose clamp some activations reach."""
MISTRAL: Config = {**DENSE, "head_dim": 12, "sliding_window": 5}
"""Tiny model with sliding-window attention in every layer."""
MINISTRAL3: Config = {**DENSE, "head_dim": 12}
MINISTRAL3 |= {"rope_parameters": {**_YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}}
"""YaRN, and queries that are scaled up with their position in steps of four positions."""
PHI3: Config = {**DENSE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 5}
PHI3 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}}
PHI3 |= {"head_dim": 8}
"""Fused projections of queries, keys and values and of gate and up, and rotary embeddings of a part of each head."""
GEMMA3: Config = {**DENSE, "head_dim": 12, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 9}
GEMMA3 |= {"tie_word_embeddings": True}
"""A sliding window in every other layer, with another rotary base, and norms before and after attention and MLP."""
EXAONE4: Config = {**DENSE, "head_dim": 12, "sliding_window": 5, "sliding_window_pattern": 2}
"""Every other layer has a sliding window and rotary embeddings, the rest has neither, as in EXAONE 4. Norms follow
attention and MLP instead of preceding them.
"""
GEMMA4: Config = {**DENSE, "head_dim": 12, "global_head_dim": 16, "sliding_window": 5, "num_hidden_layers": 3}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 0}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4 |= {"final_logit_softcapping": 2.0, "tie_word_embeddings": True}
"""Full attention with wider heads whose values are its keys, and logits with a soft cap, as in Gemma 4 31B."""
GEMMA4_INPUTS: Config = {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
GEMMA4_INPUTS |= {"num_kv_shared_layers": 1, "attention_k_eq_v": False, "use_double_wide_mlp": True}
"""Token embeddings for each layer, and a layer with the keys and values of another, as in Gemma 4 E2B."""
GEMMA4_EXPERTS: Config = {**GEMMA4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
GEMMA4_EXPERTS |= {"moe_intermediate_size": 16}
"""Routed experts beside the MLP of each layer, as in Gemma 4 26B."""
COMPRESSED: Config = {**DENSE, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 24}
COMPRESSED |= {"intermediate_size": 16, "moe_intermediate_size": 16, "n_shared_experts": 1}
COMPRESSED |= {"n_routed_experts": 8, "num_experts_per_tok": 2}
COMPRESSED |= {"qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 8, "sliding_window": 5, "swiglu_limit": 1.25}
COMPRESSED |= {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16, "hc_sinkhorn_iters": 4}
COMPRESSED |= {"num_hash_layers": 1, "rope_scaling": {**_YARN, "type": "yarn"}}
COMPRESSED |= {"compress_ratios": [0, 4, 128, 4], "compress_rate_hca": 12}
"""A sliding window in every layer, and in some layers compressed entries, whose rotary embedding is scaled. The first
layer chooses experts by token ids.
"""
HASHED: Config = {"num_hidden_layers": 5, "compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 4}
"""Changes to DeepSeek-V4's tiny model, so that later pipeline stages too have layers that choose experts by token id.
"""
QWEN3_MOE: Config = {**DENSE, "head_dim": 12, "moe_intermediate_size": 16, "num_experts": 8}
QWEN3_MOE |= {"num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0]}
"""Grouped-query attention, and routed experts in all layers after the first."""
DELTA: Config = {**DENSE, "head_dim": 16, "full_attention_interval": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
"""Gated delta nets in every other layer, and rotary embeddings of a quarter of each head."""
QWEN3_NEXT: Config = {**DELTA, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
QWEN3_NEXT |= {"shared_expert_intermediate_size": 24}
"""`DELTA` with routed experts and a gated shared expert in every layer."""
MIXTRAL: Config = {**DENSE, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
"""Tiny model with grouped-query attention and routed experts in every layer."""
OLMOE: Config = {**DENSE, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": None}
"""Experts in every layer, routing weights that do not sum to 1, and RMSNorm of queries and keys over all heads."""
MINIMAX_M2: Config = {**MIXTRAL, "head_dim": 16}
MINIMAX_M2 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
"""Routed experts in every layer, queries and keys normalised over all heads, rotary embeddings of half of each head."""
GROUPED_ROUTING: Config = {**LATENT, "n_group": 2, "topk_group": 1}
"""Tiny model with latent attention, whose routers choose experts from the best groups of experts only."""
INDEXED: Config = {**GROUPED_ROUTING, "index_topk": 32, "index_n_heads": 2, "index_head_dim": 16}
"""Tiny model with DeepSeek sparse attention. No document of the test samples is longer than `index_topk`, so sparse
attention drops no tokens; packed rows may be longer.
"""
SPARSE: Config = {"index_topk": 6, "index_n_heads": 16}
"""Changes to a tiny configuration with which sparse attention drops tokens in most documents of the test samples. With
few indexer heads many scores would be 0, and torch's choice among equal scores depends on the row's length.
"""
SHARED_INDEX: Config = {**INDEXED, "n_group": 1, "v_head_dim": 24, "index_topk_freq": 2, "index_skip_topk_offset": 1}
"""Tiny model with DeepSeek sparse attention, one group of experts, and an indexer in every other layer."""
ONE_GROUP: Config = {**LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
"""Tiny model with latent attention and a single group of experts, as in Moonlight and Kimi K2."""
PLAIN_QUERIES: Config = {**ONE_GROUP, "q_lora_rank": None}
"""Tiny model with one group of experts and queries without a latent, as in Sarvam 105B."""
WIDE_VALUES: Config = {**ONE_GROUP, "v_head_dim": 24, "routed_scaling_factor": 1.8}
"""Tiny model with one group of experts, and values as wide as queries and keys, as in GLM-4.7-Flash."""
GROUPED_QUERY_EXPERTS: Config = {**DENSE, **_EXPERTS, "head_dim": 12, "attention_bias": True}
GROUPED_QUERY_EXPERTS |= {"n_group": 1, "topk_group": 1}
"""Grouped-query attention with biases, and routed experts in all layers after the first, as in GLM-4.5-Air."""
JOINED_QUERIES: Config = {**GROUPED_QUERY_EXPERTS, "use_qk_norm": True, "partial_rotary_factor": 1.0}
JOINED_QUERIES |= {"routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6}
"""Tiny model with queries, keys and values in one published tensor, and normalised queries, as in Sarvam 30B."""

"""Tiny configurations of every family of the table."""

from typing import Any

from ds_finetune.families.configs import (
    DELTA,
    DENSE,
    EXAONE4,
    GEMMA3,
    GEMMA4_INPUTS,
    GPT_OSS,
    GROUPED_QUERY_EXPERTS,
    GROUPED_ROUTING,
    INDEXED,
    JOINED_QUERIES,
    LATENT,
    MINIMAX_M2,
    MINISTRAL3,
    MISTRAL,
    ONE_GROUP,
    PHI3,
    PLAIN_QUERIES,
    QWEN3_NEXT,
    SHARED_INDEX,
    WIDE_VALUES,
)

_COMMON = {"num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2}
_DENSE, _LATENT = DENSE | _COMMON, LATENT | _COMMON
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT | {"topk_method": "greedy", "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v3": GROUPED_ROUTING | _COMMON,
    "deepseek_v32": INDEXED | _COMMON,
    "glm_moe_dsa": SHARED_INDEX | _COMMON,
    "kimi_k2": ONE_GROUP | _COMMON,
    "sarvam_mla": PLAIN_QUERIES | _COMMON,
    "glm4_moe_lite": WIDE_VALUES | _COMMON,
    "glm4_moe": GROUPED_QUERY_EXPERTS | _COMMON | {"use_qk_norm": True},
    "sarvam_moe": JOINED_QUERIES | _COMMON,
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
    "mixtral": _DENSE | {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": MINIMAX_M2 | _COMMON,
    "olmoe": _DENSE | {"intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "llama": _DENSE,
    "exaone": _DENSE | {"rms_norm_eps": 1e-5},
    "exaone4": EXAONE4 | _COMMON,
    "mistral": MISTRAL | _COMMON,
    "ministral3": MINISTRAL3 | _COMMON,
    "gemma3_text": GEMMA3 | _COMMON,
    "gemma4_text": GEMMA4_INPUTS | _COMMON | {"layer_types": None, "num_kv_shared_layers": 0},
    "qwen3_next": QWEN3_NEXT | _COMMON,
    "qwen3_5_moe_text": QWEN3_NEXT | _COMMON,
    "qwen3_5_text": DELTA | _COMMON,
    "phi3": PHI3 | _COMMON,
    "gpt_oss": GPT_OSS | _COMMON,
}

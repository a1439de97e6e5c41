"""Writes a model's settings to a GGUF file as llama.cpp reads them, and refuses settings that llama.cpp lacks."""

import math
from typing import Any

import torch
from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ds_finetune.errors import ExportError
from ds_finetune.families.family import Family

_SCALED = {"linear": RopeScalingType.LINEAR, "yarn": RopeScalingType.YARN}
_LATENT_EPS = 1e-6
"""Epsilon of MLA's RMSNorms on latents, fixed in transformers 5.23 (deepseek_v3/modeling_deepseek_v3.py:392)."""


def check_settings(config: PretrainedConfig, family: Family) -> None:
    """Raise ExportError if a setting of config.json has no counterpart in llama.cpp."""
    assert family.gguf is not None
    rope = config.rope_parameters
    kinds = ("default", *_SCALED, *(["llama3"] if family.gguf.rotates_pairs else []))
    allowed: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), **family.gguf.computes}
    values = [(name, getattr(config, name, supported[0]), supported) for name, supported in allowed.items()]
    values.append(("rope_type", rope["rope_type"], kinds))
    if hasattr(config, "kv_lora_rank") and rope["rope_type"] == "yarn":
        # llama.cpp scales attention scores by mscale_all_dim, but not cosines and sines, so mscale must equal it.
        ratio = _yarn_factor(config) if rope.get("mscale_all_dim") else None
        values.append(("the ratio of YaRN's mscale and mscale_all_dim", ratio, (1.0,)))
    if rope["rope_type"] == "yarn":
        # llama.cpp always rounds the limits of YaRN's ramp; gpt_oss, which does not, would get logits off by up to 0.9.
        values.append(("YaRN's truncate", rope.get("truncate", True), (True,)))
    for name, value, supported in values:
        if value not in supported:
            raise ExportError(
                f"{name} is {value} in config.json, and llama.cpp supports only {supported[0]} for {config.model_type}",
                hint="export with --format safetensors or onnx",
            )
    for name in ("num_experts_per_tok", *(["sliding_window"] if family.has_sinks else [])):
        if getattr(config, name, 0) is None:
            raise ExportError(
                f"{name} is null in config.json, and llama.cpp needs a number",
                hint=f"set {name} in config.json to the value that the model was trained with",
            )


def notes_on(config: PretrainedConfig) -> list[str]:
    """Notes for the user on settings with which llama.cpp computes slightly other logits than transformers."""
    notes = []
    if hasattr(config, "kv_lora_rank") and config.rms_norm_eps != _LATENT_EPS:
        notes.append(
            f"llama.cpp normalises MLA's latents with epsilon {config.rms_norm_eps:g} (rms_norm_eps), and transformers "
            f"with {_LATENT_EPS:g}: logits differ by about 1e-4"
        )
    return notes


def head_dim(config: PretrainedConfig) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_factors(config: PretrainedConfig) -> torch.Tensor | None:
    """Divisors of the rotary frequencies for llama.cpp, fp32 [pairs], if RoPE is scaled as in Llama 3; else None."""
    if config.rope_parameters["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = 2 * len(scaled)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    return (plain / scaled).float()


def add_settings(writer: GGUFWriter, config: PretrainedConfig, family: Family) -> None:
    """Write the sizes and settings of the model to the GGUF `writer`."""
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        **({"sliding_window": config.sliding_window} if family.has_sinks else {}),
        **(_latent_heads(config) if hasattr(config, "kv_lora_rank") else _heads(config)),
        **_rope(config),
        **(_experts(config, family) if family.expert_keys is not None else {}),
    }
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)


def _heads(config: PretrainedConfig) -> dict[str, Any]:
    width, rotated = head_dim(config), config.rope_parameters.get("partial_rotary_factor", 1.0)
    sizes = {"head_count_kv": config.num_key_value_heads, "key_length": width, "value_length": width}
    return sizes | {"rope_dimension_count": int(width * rotated)}


def _latent_heads(config: PretrainedConfig) -> dict[str, Any]:
    """Settings of latent attention, which in llama.cpp has one key/value head as wide as the cached latent."""
    return {
        "head_count_kv": 1,
        # If q_lora_rank is missing, llama.cpp requires 26, 27 or 48 layers (src/models/deepseek2.cpp, is_lite).
        "q_lora_rank": config.q_lora_rank or 0,
        "kv_lora_rank": config.kv_lora_rank,
        "key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "value_length": config.kv_lora_rank,
        "key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "value_length_mla": config.v_head_dim,
        "rope_dimension_count": config.qk_rope_head_dim,
    }


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    rope = config.rope_parameters
    base = {"rope_freq_base": rope["rope_theta"]}
    if rope["rope_type"] not in _SCALED:
        return base
    base |= {"rope_scaling_type": _SCALED[rope["rope_type"]], "rope_scaling_factor": rope["factor"]}
    if rope["rope_type"] == "linear":
        return base
    base |= {
        "rope_scaling_orig_ctx_len": rope["original_max_position_embeddings"],
        "rope_scaling_yarn_beta_fast": rope.get("beta_fast") or 32.0,
        "rope_scaling_yarn_beta_slow": rope.get("beta_slow") or 1.0,
    }
    if hasattr(config, "kv_lora_rank"):
        # llama.cpp divides yarn_log_mul by 0.1 (src/models/deepseek2.cpp, TAG_DEEPSEEK2_YARN_LOG_MUL_FIX).
        return base | {"rope_scaling_yarn_log_mul": 0.1 * rope["mscale_all_dim"]}
    # llama.cpp multiplies attn_factor by YaRN's default factor, which is therefore divided out (src/llama-context.cpp,
    # yarn_attn_factor).
    default_factor = 0.1 * math.log(max(rope["factor"], 1.0)) + 1.0
    return base | {"rope_scaling_attn_factors": _yarn_factor(config) / default_factor}


def _yarn_factor(config: PretrainedConfig) -> float:
    return float(ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))[1])


def _experts(config: PretrainedConfig, family: Family) -> dict[str, Any]:
    assert family.expert_keys is not None
    assert family.router is not None
    sizes = {
        "expert_count": family.expert_keys.number(config.to_dict()),
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": getattr(config, family.expert_keys.width_key),
    }
    if not hasattr(config, "first_k_dense_replace"):
        return sizes
    is_sigmoid = family.router.scores == "sigmoid"
    sizes |= {
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        # transformers 5.23 never normalises the weights of softmax routers; it ignores norm_topk_prob for them
        # (deepseek_v2/modeling_deepseek_v2.py:97-116).
        "expert_weights_norm": is_sigmoid and config.norm_topk_prob,
        "expert_gating_func": ExpertGatingFuncType.SIGMOID if is_sigmoid else ExpertGatingFuncType.SOFTMAX,
    }
    if not is_sigmoid or config.n_group == 1:
        return sizes
    return sizes | {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}

"""Modules whose LoRA adapters vLLM computes, by model type.

vLLM 0.32 wraps every linear layer of a class that has `SupportsLoRA` (vllm/lora/utils.py:232). It looks for adapters
under the published names of weights, with one name per routed expert (vllm/lora/utils.py:385), and silently ignores
adapters under other names (vllm/lora/model_manager.py:396).
"""

from collections.abc import Mapping

VLLM = "vLLM 0.32"
LARGEST_RANK = 512
"""Maximum LoRA rank that vLLM serves (vllm/config/lora.py:26)."""
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_DENSE = _MLP | {"q_proj", "k_proj", "v_proj", "o_proj"}
_MIXTURE = _DENSE | {"gate"}
_LATENT = _MLP | {"gate", "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}
"""Modules of latent attention whose adapters vLLM computes. `kv_b_proj` is left out, because vLLM decodes with its
original weight (vllm/model_executor/layers/attention/mla_attention.py:1248), so an adapter would act in prefill only.
"""
_COMPRESSED = frozenset({"attn.wq_a", "attn.wkv", "attn.wq_b", "attn.wo_b", "w1", "w2", "w3"})
"""Modules of DeepSeek-V4 whose adapters vLLM computes. Modules are left out if kernels read their weights directly:
compressors (vllm/models/deepseek_v4/attention.py:695, 712), `wo_a` and, with fused experts, the router
(vllm/models/deepseek_v4/nvidia/model.py:964).
"""
VLLM_LORA: Mapping[str, frozenset[str]] = {
    "llama": _DENSE,  # class in vllm/model_executor/models/llama.py:475
    "qwen2": _DENSE,  # class in vllm/model_executor/models/qwen2.py:462
    "qwen3": _DENSE,  # class in vllm/model_executor/models/qwen3.py:284
    "qwen3_moe": _MIXTURE,  # class in vllm/model_executor/models/qwen3_moe.py:553
    "olmoe": _MIXTURE,  # class in vllm/model_executor/models/olmoe.py:347
    "glm4_moe": _MIXTURE,  # class in vllm/model_executor/models/glm4_moe.py:535
    "mixtral": _MIXTURE - _MLP | {"w1", "w2", "w3"},  # class in vllm/model_executor/models/mixtral.py:379
    "deepseek_v2": _LATENT,  # class in vllm/model_executor/models/deepseek_v2.py:1880
    "deepseek_v3": _LATENT,  # class in vllm/model_executor/models/deepseek_v2.py:2005
    "kimi_k2": _LATENT,  # class in vllm/model_executor/models/deepseek_v2.py:2005
    "glm4_moe_lite": _LATENT,  # class in vllm/model_executor/models/glm4_moe_lite.py:546
    "deepseek_v32": _LATENT,  # class in vllm/models/deepseek_v32/nvidia/model.py:427
    "glm_moe_dsa": _LATENT,  # class in vllm/models/deepseek_v32/nvidia/model.py:427
    "deepseek_v4": _COMPRESSED,  # class in vllm/models/deepseek_v4/nvidia/model.py:1799
    "qwen2_moe": _MIXTURE,  # class in vllm/model_executor/models/qwen2_moe.py:423
    "gpt_oss": _DENSE - _MLP,  # class in vllm/model_executor/models/gpt_oss.py:1411
}
"""For each model type, the modules whose adapters vLLM computes on NVIDIA GPUs. They are named by the last part of
their published names. A model type is missing if its class in vLLM has no `SupportsLoRA` or was not checked.
"""

"""A tiny folder as DeepSeek-V4-Flash publishes it: experts in FP4, other linear weights in FP8, and plain decoding of
both.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.model.fp8_folder import coded, publish, read_all

V4: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128],
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
_IN_FP4 = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
_IN_FP8 = re.compile(r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|shared_experts\.w[123])\.weight$")
_IN_FP32 = re.compile(r"(hc_\w+|attn_sink|ape|gate\.bias)$")
_NAMES = (("model.", ""), ("embed_tokens.", "embed."), ("hc_head.hc_", "hc_head_"), (".attn.norm.", ".attn.kv_norm."))
_KEYS_OF_TRANSFORMERS = ("compress_rates", "layer_types", "mlp_layer_types", "rope_parameters")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def publish_v4(folder: Path, prepare: Callable[[PreTrainedModel], None] = lambda lm: None, **changes: Any) -> Path:
    """Random weights by published names, with a prediction layer's norm, in `folder`; `changes` of its config, and what
    `prepare` makes of the weights.
    """
    torch.manual_seed(3)
    config = AutoConfig.for_model("deepseek_v4", **V4 | changes)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    prepare(lm)
    lm.save_pretrained(folder / "plain")
    tensors: dict[str, torch.Tensor] = {"mtp.0.norm.weight": torch.ones(128).bfloat16()}
    for key, tensor in read_all(folder / "plain").items():
        name = key
        for old, new in _NAMES:
            name = name.replace(old, new, 1)
        scale = name.removesuffix(".weight") + ".scale"
        if _IN_FP4.search(name):
            rows, columns = tensor.shape
            tensors[name] = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            exponents = torch.randint(116, 124, (rows, columns // 32), dtype=torch.uint8)
            tensors[scale] = exponents.view(torch.float8_e8m0fnu)
        elif _IN_FP8.search(name):
            tensors[name], blocks = coded(tensor)
            tensors[scale] = torch.exp2(torch.ceil(torch.log2(blocks))).to(torch.float8_e8m0fnu)
        else:
            tensors[name] = tensor.float() if _IN_FP32.search(name) else tensor
    tree = {key: value for key, value in config.to_dict().items() if key not in _KEYS_OF_TRANSFORMERS} | V4 | changes
    tree |= {"architectures": ["DeepseekV4ForCausalLM"], "torch_dtype": "bfloat16", "topk_method": "noaux_tc"}
    section = {"expert_dtype": "fp4", "quantization_config": QUANTIZATION}
    return publish(folder / "v4", tensors, config=tree | section)


def decoded_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Plain Python: sign and E2M1 of each half byte, the lower half first, times the scale of its 32 numbers."""
    table = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    low, high = packed.long() & 15, packed.long() >> 4 & 15
    values = table[torch.stack([low, high], dim=-1).flatten(-2)]
    return values * scale.float().repeat_interleave(32, dim=-1)

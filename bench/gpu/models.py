"""Models of real shapes with fresh weights, and texts for them; no file of another project is needed."""

import json
import random
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from bench.gpu.machine import device
from ds_finetune.cli.demo import write_tokenizer
from ds_finetune.families.table import family_of
from ds_finetune.model.build.skeleton import build_skeleton, read_hf_config
from ds_finetune.model.weights.names import hub_pieces

_SHARD_BYTES = 4 * 2**30
Config = Mapping[str, Any]
"""Contents of config.json."""

_QWEN2: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "num_hidden_layers": 28,
}
QWEN2_1B: Config = {
    **_QWEN2,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
"""DeepSeek-R1-Distill-Qwen-1.5B: 1.78 B parameters with embedding and head."""
QWEN2_7B: Config = {
    **_QWEN2,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
"""DeepSeek-R1-Distill-Qwen-7B."""
DEEPSEEK_V2_LITE: Config = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
"""DeepSeek-V2-Lite, without the extension of its positions: 15.7 B parameters, of which a token uses 2.7 B."""

_TINY: Config = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "initializer_range": 0.2,
}
_TINY_LATENT: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}


def tiny(config: Config) -> Config:
    """The same kind of model for rehearsals: two layers, and widths of a few columns."""
    latent = _TINY_LATENT if "kv_lora_rank" in config else {}
    return {**config, **_TINY, **latent}


def write_model(folder: Path, config: Config) -> Path:
    """Write config.json, and to `folder/tokenizer` one with a token for each letter; returns the folder.

    The tokenizer is of the class that transformers 5 takes for the model type: a run refuses one that an export would
    load otherwise.
    """
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}))
    write_tokenizer(folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", config=AutoConfig.from_pretrained(folder))
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def write_weights(folder: Path) -> None:
    """Write fresh weights in bf16 for the configuration in `folder`, by their published names."""
    hf_config = read_hf_config(str(folder))
    lm = build_skeleton(hf_config, attention="eager", dtype=torch.bfloat16, device="meta")
    family, files = family_of(hf_config.model_type), dict[str, str]()
    shard: dict[str, torch.Tensor] = {}
    for name, param in lm.named_parameters():
        for piece in hub_pieces(name, tuple(param.shape), family):
            values = torch.randn(piece.shape, device=device(), dtype=torch.bfloat16) * hf_config.initializer_range
            shard[piece.key] = (values + float(piece.key.endswith("norm.weight"))).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > _SHARD_BYTES:
            _save_shard(folder, shard, files)
    _save_shard(folder, shard, files)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _save_shard(folder: Path, shard: dict[str, torch.Tensor], files: dict[str, str]) -> None:
    """Write the tensors of `shard` to a further file, note where they are, and drop them."""
    if shard:
        file = f"model-{len(set(files.values())) + 1:05}.safetensors"
        save_file(shard, folder / file)
        files |= dict.fromkeys(shard, file)
        shard.clear()


def write_texts(path: Path, lengths: Sequence[int]) -> Path:
    """Write a JSONL file of texts with these numbers of tokens, of random letters; returns the path."""
    draw = random.Random(0)
    letters = string.ascii_letters
    with path.open("w") as lines:
        for length in lengths:
            lines.write(json.dumps({"text": "".join(draw.choices(letters, k=length))}) + "\n")
    return path


def packed_lengths(tokens: int, *, mean: int = 370) -> list[int]:
    """Lengths of documents that fill `tokens` tokens, between half and one and a half times `mean`; the mean is that of
    eleven documents in a row of 4,096.
    """
    draw, lengths = random.Random(1), list[int]()
    while sum(lengths) < tokens:
        lengths.append(max(2, draw.randint(mean // 2, mean * 3 // 2)))
    return lengths

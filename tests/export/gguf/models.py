"""Tiny models with a tokenizer that llama.cpp knows, and what plain transformers computes with them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.model.weights.test_weights import published

VOCAB = 128
TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
TEXTS = ("Natalia sold clips to 48 of her friends", "def fibonacci(n: int):\n    return n", "the best  of times, ")
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
_LATENT_YARN = {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
_NO_GROUPS = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 16}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {**_YARN, "attention_factor": 1.3}}),
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": _YARN, "head_dim": 12}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 12}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "deepseek_v2": ("deepseek_v2", {**_NO_GROUPS, "rope_parameters": _LATENT_YARN}),
    "deepseek_v2_lite": ("deepseek_v2", {**_NO_GROUPS, "q_lora_rank": None}),
    "deepseek_v3": (
        "deepseek_v3",
        {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "rope_parameters": _LATENT_YARN},
    ),
    "deepseek_v3_moonlight": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "routed_scaling_factor": 2.5},
    ),
    "kimi_k2": ("kimi_k2", {"rope_parameters": _LATENT_YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", {"rms_norm_eps": 1e-6}),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True}),
    "glm4_moe_air": ("glm4_moe", {"use_qk_norm": False, "attention_bias": True}),
    "gpt_oss": ("gpt_oss", {"swiglu_limit": 7.0, "sliding_window": 8, "rope_parameters": _YARN}),
}
"""Model type and changes of its tiny configuration, by name."""


def save(name: str, folder: Path, **changes: object) -> PreTrainedModel:
    """Save a tiny model with peaked logits, and its tokenizer."""
    family, own = MODELS[name]
    torch.manual_seed(5)
    model = published(family, folder, **{"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, **own, **changes})
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "norm.weight", "sinks")):
                parameter += torch.randn_like(parameter) / 4
        model.get_output_embeddings().weight.mul_(8)
    model.save_pretrained(folder)
    tokenizer(family).save_pretrained(folder)
    return model


def tokenizer(family: str = "") -> PreTrainedTokenizerFast:
    """GPT-2's kind, or Qwen2's for its families, of ASCII, some merges, and two special tokens."""
    core = Tokenizer(models.BPE())
    if family.startswith("qwen"):
        core.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN2), "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    # llama.cpp's server lists no tokens that are a part of a character.
    alphabet = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter.isascii() or letter in "ĠĊ"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    core.train_from_iterator([text * 3 for text in TEXTS], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
    """The tokens that follow `prompt` greedily without an end of sequence, and their log-probabilities."""
    ids, logs = list(prompt), []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        logs.append(logits.log_softmax(-1))
        logits[model.config.eos_token_id] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], torch.stack(logs)

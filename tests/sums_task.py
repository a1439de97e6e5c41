"""A task for rewards in a folder: sums of two digits, and a Llama of 84,032 parameters that gets about 60% of them right."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS, PAD, PLUS, EQUALS = 10, 11, 12, 13
_TOKENS = [*"0123456789", "<eos>", "<pad>", "+", "="]
_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] + ('=' if message['role'] == 'user' else eos_token) }}"
    "{% endfor %}"
)
_STEPS = 250
SUMS = [(a, b) for a in range(10) for b in range(10)]


def sums_task(folder: Path, **sections: Any) -> Path:
    """Write model, tokenizer, data and the run file of a short run with rewards; returns the run file."""
    write_model(folder / "model")
    rows = [{"prompt": f"{a}+{b}", "answer": f"{a + b:02d}"} for a, b in SUMS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "model": str(folder / "model"),
        "objective": {"name": "grpo", "group_size": 4},
        "rollout": {"prompts_per_step": 4, "max_new_tokens": 4},
        "rewards": ["exact_match"],
        "data": {"train": str(folder / "train.jsonl"), "cache_dir": str(folder / "cache")},
        "train": {
            "for": "3 steps",
            "micro_batch_size": 4,
            "max_seq_len": 16,
            "precision": "fp32",
            "activation_checkpointing": "none",
        },
        "optim": {"lr": 3e-4},
        "eval": {"keep_best": False},
        "deepspeed": {"zero_optimization": {"stage": 0}},
        "log": {"trackers": [], "seconds": 0},
        "export": {"verify": False},
        "output_dir": str(folder / "run"),
    }
    for key, values in sections.items():
        tree[key] = tree.get(key, {}) | values if isinstance(values, dict) and key != "deepspeed" else values
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump(tree))
    return run_file


def write_model(folder: Path) -> None:
    """Write the model with its tokenizer."""
    core = Tokenizer(models.WordLevel({token: number for number, token in enumerate(_TOKENS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    model = LlamaForCausalLM(_config())
    model.load_state_dict(_start())
    model.save_pretrained(folder)


def _config() -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
    return LlamaConfig(vocab_size=14, num_key_value_heads=4, max_position_embeddings=32, **sizes, **ids)


def _prompt(a: int, b: int) -> list[int]:
    return [a, PLUS, b, EQUALS]


def _answer(a: int, b: int) -> list[int]:
    return [*map(int, f"{a + b:02d}"), EOS]


@cache
def _start() -> dict[str, torch.Tensor]:
    """Weights after supervised steps on answers of which half are wrong."""
    torch.manual_seed(0)
    draw = random.Random(0)
    model = LlamaForCausalLM(_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(_STEPS):
        pairs = [draw.choice(SUMS) for _ in range(64)]
        noise = [[draw.randrange(2), draw.randrange(10), EOS] for _ in pairs]
        answers = [_answer(*pair) if draw.random() < 0.5 else wrong for pair, wrong in zip(pairs, noise, strict=True)]
        rows = torch.tensor([_prompt(*pair) + answer for pair, answer in zip(pairs, answers, strict=True)])
        logits = model(input_ids=rows, use_cache=False).logits[:, 3:-1]
        functional.cross_entropy(logits.flatten(0, 1), rows[:, 4:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def greedy_share(model: LlamaForCausalLM) -> float:
    """Share of the hundred sums that the model gets right."""
    ids = torch.tensor([_prompt(*pair) for pair in SUMS])
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    right = torch.tensor([_answer(*pair) for pair in SUMS])
    return float((ids[:, 4:] == right).all(dim=1).float().mean())

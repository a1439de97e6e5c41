"""A task of three questions, which a tiny Llama learns to answer exactly, and how programs other than this one answer."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from ds_finetune import read_config, train
from tests.conftest import ROOT
from tests.export.gguf.models import VOCAB, tokenizer

ANSWERS = {"red fruit?": "an apple", "yellow fruit?": "one banana", "blue fruit?": "some plums"}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS, START, END = "</s>", "<|im_start|>", "<|im_end|>"
PLAIN = ROOT / "tests" / "plain_answers.py"


def chats(answers: Mapping[str, str] = ANSWERS) -> list[dict[str, Any]]:
    """Rows of messages."""
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in answers.items()
    ]


def write_base(
    folder: Path, *, template: object = None, family: str = "", config: Mapping[str, Any] | None = None
) -> Path:
    """A base model that ends texts with `</s>` and knows ChatML's tokens; `config` changes its tokenizer_config.json."""
    made = tokenizer(family)
    made.add_special_tokens({"additional_special_tokens": [START, END]})
    made.chat_template = template
    made.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(config or {})))
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": made.bos_token_id, "eos_token_id": made.eos_token_id, "pad_token_id": None}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=256, **sizes, **ids)
    ).save_pretrained(folder)
    return folder


def train_answers(folder: Path, rows: Sequence[Mapping[str, Any]], **sections: Any) -> Path:
    """Train the base in `folder/base` on rows until it knows them; returns the export."""
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "model": str(folder / "base"),
        "data": {"train": str(folder / "train.jsonl"), "cache_dir": str(folder / "cache"), "packing": False},
        "train": {
            "for": "60 steps",
            "global_batch_size": len(rows),
            "micro_batch_size": len(rows),
            "max_seq_len": 256,
            "precision": "fp32",
            "activation_checkpointing": "none",
        },
        "optim": {"lr": 5e-3},
        "eval": {"keep_best": False},
        "deepspeed": {"zero_optimization": {"stage": 0}},
        "log": {"trackers": [], "seconds": 0},
        "output_dir": str(folder / "run"),
    }
    for key, values in sections.items():
        tree[key] = tree.get(key, {}) | values if isinstance(values, dict) else values
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump(tree))
    report = train(read_config(run_file))
    return report.exports[0]


def plain_answers(folder: Path, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What plain transformers in a new process answers to requests: their prompt's ids, and the answer with its end."""
    command = [sys.executable, str(PLAIN), str(folder)]
    done = subprocess.run(
        command, input=json.dumps(list(requests)), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found

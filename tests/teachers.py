"""Teachers of distillations: tiny models with the tokenizer of a task."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def write_teacher(folder: Path, model: Path, **changes: Any) -> None:
    """Write a llama that is sure of itself to `folder`, with the tokenizer and the vocabulary of `model`."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocabulary, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3} | changes
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(folder)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder)

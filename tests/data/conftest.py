"""A tokenizer and the chat templates that tests of conversations share."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.cli.demo import write_demo
from ds_finetune.data.tokenizer_files import load_tokenizer


@pytest.fixture(scope="session")
def chat_tokenizer(shared_data: Path) -> PreTrainedTokenizerBase:
    """R1-Distill-Qwen's tokenizer, with the special tokens of ChatML."""
    found = load_tokenizer(str(shared_data / "tokenizers" / "deepseek-r1-distill-qwen"))
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return found


@pytest.fixture(scope="session")
def chat_templates(shared_data: Path) -> dict[str, str]:
    """Every chat template of the real data by file or folder, each source once."""
    folder = shared_data / "tokenizers"
    found: dict[str, str] = {}
    for file in sorted([*(folder / "chat_templates").iterdir(), *folder.glob("*/tokenizer_config.json")]):
        source = file.read_text() if file.suffix == ".jinja" else json.loads(file.read_text()).get("chat_template")
        if source and source not in found.values():
            found[file.name if file.parent.name == "chat_templates" else file.parent.name] = source
    return found


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """One token for each character, and for the beginning, each of the two roles and the end of a dialogue."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    return load_tokenizer(str(folder / "model"))

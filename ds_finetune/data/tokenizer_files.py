"""The tokenizer of a folder, as published."""

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ds_finetune.errors import DataError


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """A fast tokenizer from a folder; DataError where there is none, or it has no end-of-sequence token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True)
    except (OSError, ValueError) as missing:
        raise DataError(f"no tokenizer in `{folder}`: {missing}", hint="set model.tokenizer to a folder with tokenizer.json") from missing
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of `{folder}` has no eos_token", hint="add eos_token to its tokenizer_config.json")
    settings = Path(folder) / "tokenizer_config.json"
    if settings.is_file() and json.loads(settings.read_text(encoding="utf-8")).get("add_bos_token"):
        # transformers 5.23 drops `add_bos_token` of a plain tokenizer.json and would put no BOS before a prompt.
        tokenizer.add_bos_token = True
    return tokenizer

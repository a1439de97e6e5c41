"""The tokenizer of a folder, as published."""

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
    return tokenizer

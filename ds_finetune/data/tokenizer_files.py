"""Loads the tokenizer of a folder, and checks that it gives the same tokens as its tokenizer.json."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_finetune.errors import DataError
from ds_finetune.foreign.auto_configs import AutoTokenizer

PROBES = {
    "code": "def f(x):\n    return x[1:] != 0  # no\n\n\tpass\n#include <x>\r\n",
    "digits": "1234567890 3.14159 1,000,000 ² ٣٤ $5.00",
    "words": "I'm we'LL DON'T e-mail “quoted”… x=y;z(a,b){c}//!!!???\n\n1st",
    "accents": "café cafe\u0301 Ångström A\u030angstro\u0308m ﬁ Ⅷ",
    "scripts": "Привет мир, 你好，世界2024年。こんにちは 안녕 مرحبا שלום नमस्ते สวัสดี",  # noqa: RUF001
    "white space": " a  b   c\t\td\r\n\r\n\n\n e \u00a0\u3000f  ",
    "emoji": "🙂👩‍👩‍👧‍👦🇩🇪 ok👍🏽",
}
"""Texts that two tokenizers encode differently if they normalise text or split it into words differently."""
_SHOWN_TOKENS = 12
_TIKTOKEN = "tiktoken.model"
_OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_PATTERNS = ("tokenizer*.json", "vocab*", "merges*", "*.model", "*.spm", "*.tiktoken", "tekken.json", "*.codes")
"""File name patterns of the files that can define a tokenizer; `tokenizer_config.json` alone does not."""


def has_vocabulary(folder: Path) -> bool:
    """Whether a folder has files that define a tokenizer."""
    names = {path.name for kind in _PATTERNS for path in folder.glob(kind)}
    return bool(names - {"tokenizer_config.json"})


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer of a folder.

    DataError if the folder has no tokenizer or only a tiktoken.model, if the tokenizer has no end-of-sequence token (an
    encoder's needs none), or if its tokens differ from those of its tokenizer.json.
    """
    _check_files(Path(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        tokenizer([*PROBES.values()])
    except Exception as refused:
        # The tokenizers library raises plain Exception, e.g. for a text that needs an unknown token that is missing.
        hint = "set model.tokenizer to a folder with tokenizer.json"
        if (Path(folder) / "tokenizer.json").is_file():
            hint = "if the tokenizer is of another type of model than config.json, set tokenizer_class to "
            hint += "PreTrainedTokenizerFast in its tokenizer_config.json"
        raise DataError(f"no tokenizer in `{folder}`: {refused}", hint=hint) from refused
    if tokenizer.eos_token_id is None and not is_encoder_tokenizer(tokenizer):
        raise DataError(
            f"the tokenizer of `{folder}` has no eos_token", hint="add eos_token to its tokenizer_config.json"
        )
    if (path := Path(folder) / "tokenizer.json").is_file():
        # For a qwen2 config, transformers 5.23 uses Qwen2Tokenizer whatever class tokenizer_config.json names
        # (models/auto/tokenization_auto.py:421, 863-897), and only the vocabulary and merges of tokenizer.json.
        published = Tokenizer.from_file(str(path))
        published.no_truncation()
        published.no_padding()
        _compare(
            tokenizer,
            lambda text: published.encode(text, add_special_tokens=False).ids,
            f"transformers loads {path}",
            f"{_SAVED_HINT}; to train with those of tokenizer.json, copy the tokenizer's files to a folder without "
            "config.json, set tokenizer_class there to PreTrainedTokenizerFast, and name that folder in "
            "model.tokenizer, which is refused where the model's type has a class of its own",
        )
    path = Path(folder) / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if settings.get("add_bos_token"):
        # transformers 5.23 ignores `add_bos_token` beside a plain tokenizer.json; prompts would then lack BOS.
        tokenizer.add_bos_token = True
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything in a tokenizer that determines the ids of a text."""
    core = tokenizer.backend_tokenizer
    # Truncation and padding are not hashed, since transformers 5.23 turns them off before each tokenizer call.
    core.no_truncation()
    core.no_padding()
    return hashlib.sha256(core.to_str().encode()).hexdigest()


def is_encoder_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a text between a class token and a separator, as encoders such as BERT expect."""
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        return False
    ids = tokenizer("x")["input_ids"]
    return bool(ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id)


def _check_files(folder: Path) -> None:
    """Raise DataError for a folder without a vocabulary, with only tiktoken's vocabulary (as Kimi K2 and Moonlight are
    published), or with a configuration file that is not a JSON object.

    Without a vocabulary, transformers 5.23 makes an empty tokenizer for some model types, such as qwen3 and
    gemma3_text, which encodes texts to no tokens or unknown ones. The pattern by which tiktoken splits texts is only in
    the folder's Python code (tokenization_kimi.py, tokenization_moonshot.py).
    """
    if folder.is_dir() and not has_vocabulary(folder):
        raise DataError(
            f"no tokenizer in `{folder}`: it has neither tokenizer.json nor another file with a vocabulary",
            hint="copy the tokenizer's files to it, or set model.tokenizer to a folder with tokenizer.json",
        )
    for file in (folder / name for name in _OBJECTS):
        if file.is_file() and not file.read_bytes().lstrip().startswith(b"{"):
            raise DataError(f"{file} holds no JSON object", hint="replace it by the file published with the model")
    if (folder / _TIKTOKEN).is_file() and not (folder / "tokenizer.json").is_file():
        raise DataError(
            f"`{folder}` has {_TIKTOKEN} and no tokenizer.json: its tokenizer is Python code of the folder, which is "
            "never run",
            hint="set model.tokenizer to a folder with tokenizer.json of the same vocabulary",
        )


def check_beside(tokenizer: PreTrainedTokenizerBase, folder: str, config: PretrainedConfig) -> None:
    """Raise DataError if the tokenizer of `folder` gives other tokens when transformers loads it beside the model's
    config.json, as in an export. `config` is this config.json.
    """
    try:
        served = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        served([*PROBES.values()])
    except Exception as refused:
        raise DataError(
            f"transformers cannot load the tokenizer of `{folder}` beside a config.json of type {config.model_type}: "
            f"{refused}",
            hint="name a tokenizer of this type of model in model.tokenizer",
        ) from refused
    _compare(
        served,
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        f"an export of this model would have other tokens than training: beside a config.json of type "
        f"{config.model_type}, transformers loads the tokenizer of {folder}",
        _SAVED_HINT,
    )


_SAVED_HINT = (
    "to train with the tokens that transformers makes, as servers do, write them by AutoTokenizer.from_pretrained("
    "TOKENIZER, config=AutoConfig.from_pretrained(MODEL)).save_pretrained(NEW), and set model.tokenizer to NEW"
)


def _compare(
    tokenizer: PreTrainedTokenizerBase, expected_of: Callable[[str], list[int]], loading: str, hint: str
) -> None:
    for name, text in PROBES.items():
        expected, actual = expected_of(text), tokenizer(text, add_special_tokens=False)["input_ids"]
        if actual == expected:
            continue
        pairs = enumerate(zip(expected, actual, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(actual)))
        shown = slice(start, start + _SHOWN_TOKENS)
        ours, theirs = (tokenizer.convert_ids_to_tokens(ids[shown]) for ids in (expected, actual))
        raise DataError(
            f"{loading} as {type(tokenizer).__name__}, which gives other tokens for {name} ({text!r}), from "
            f"token {start} on: {theirs} instead of {ours}",
            hint=hint,
        )

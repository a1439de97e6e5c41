"""Changes an exported tokenizer so that transformers' pipelines tokenise as training does.

In training, each text that a decoder classifies ends with EOS, and begins with BOS if tokenizer_config.json has
`add_bos_token`. If there is a tokenizer.json, transformers 5.23 ignores `add_bos_token` and `add_eos_token` and uses
the post-processor of tokenizer.json, which seldom adds EOS. So an export replaces this post-processor.
"""

import itertools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ds_finetune.data.prompt_format import GENERATION, PromptFormat
from ds_finetune.data.sample_tokens import SampleTokeniser
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import DataError
from ds_finetune.export.model_config import TOKENIZER_CONFIG
from ds_finetune.export.verify.record import TEXTS
from ds_finetune.foreign.auto_configs import AutoTokenizer
from ds_finetune.model.build.hub_folder import copy_model_file
from ds_finetune.model.loss.score_config import NEW_PADDING, is_classifier

Encode = Callable[[str, str | None], list[int]]
"""Function from a text, or a pair of texts, to the token ids that training uses."""
_TOKENIZER = "tokenizer.json"
_ADDED = ("add_bos_token", "add_eos_token")
"""Keys that exports remove from tokenizer_config.json, since they make some tokenizers replace the post-processor."""
_PROBE = "x"
_SINGLE = [(text, None) for text in TEXTS]
_PAIRS = list(itertools.pairwise(TEXTS))


@dataclass(frozen=True)
class FittedTokenizer:
    """The changed tokenizer files of an export, and a comparison of their token ids with those of training."""

    changed: Mapping[str, str]
    """New text of the changed tokenizer files, by file name."""
    texts: tuple[str, ...] = ()
    """Sample texts that a pipeline of transformers tokenises as training does."""
    notes: tuple[str, ...] = ()
    """Notes for the user on texts that a pipeline of transformers tokenises differently from training."""


def fit_tokenizer(
    tokenizer: PreTrainedTokenizerBase, files: Mapping[str, Path], encode: Encode, *, config: Mapping[str, Any]
) -> FittedTokenizer:
    """Change the tokenizer files of a decoder classifier so that a transformers pipeline tokenises as `encode` does.

    `files` are paths by file name. Texts are padded with the `pad_token_id` of `config`, the model's config.json.
    """
    # transformers chooses the class of the tokenizer by config.json, so the trial folder needs one.
    changed = {
        "config.json": json.dumps(config),
        TOKENIZER_CONFIG: with_padding(files, tokenizer, config["pad_token_id"]),
    }
    texts = _agreeing(files, changed, encode, _SINGLE)
    template = None if texts else _template(tokenizer, encode)
    if template is not None:
        changed[_TOKENIZER] = _with_template(files, tokenizer, template)
        texts = _agreeing(files, changed, encode, _SINGLE)
    notes = []
    if len(texts) < len(_SINGLE):
        notes.append(_note_on_texts(tokenizer, encode, len(texts)))
    elif len(_agreeing(files, changed, encode, _PAIRS)) < len(_PAIRS):
        notes.append(
            "the exported tokenizer joins a text and its text_pair otherwise than training: join them yourself"
        )
    del changed["config.json"]
    return FittedTokenizer(changed, tuple(text for text, _ in texts), tuple(notes))


def fit_beginning(
    tokenizer: PreTrainedTokenizerBase,
    files: Mapping[str, Path],
    prompts: PromptFormat,
    *,
    config: Mapping[str, Any],
) -> dict[str, str]:
    """For a language model, make a tokenizer.json that adds the same special tokens before a text as training does, and
    none after it. Returns its content by file name, or an empty dict if the present file needs no change. `files` are
    the tokenizer files by name, `config` is the model's config.json.
    """
    is_same = tokenizer(_PROBE)["input_ids"] == prompts.text_ids(tokenizer, _PROBE)
    if is_same and not getattr(tokenizer, "add_bos_token", False):
        return {}

    def encode(text: str, _: str | None) -> list[int]:
        return prompts.text_ids(tokenizer, text)

    if len(_agreeing(files, {"config.json": json.dumps(config)}, encode, _SINGLE)) == len(_SINGLE):
        return {}
    begin = SampleTokeniser(tokenizer, prompts.settings, bos=prompts.bos).begin
    return {_TOKENIZER: _with_template(files, tokenizer, {"before": begin, "between": [], "after": []})}


def fit_folder(
    files: Sequence[Path], config: Mapping[str, Any]
) -> tuple[PreTrainedTokenizerBase, dict[str, str]] | None:
    """The tokenizer of `files` and the result of `fit_beginning`; None for a classifier, or if no tokenizer loads."""
    named = {path.name: path for path in files if path.name != GENERATION}
    if is_classifier(config) or not named:
        return None
    try:
        tokenizer = load_tokenizer(str(next(iter(named.values())).parent))
    except DataError:
        return None
    return tokenizer, fit_beginning(tokenizer, named, PromptFormat.of_tokenizer(tokenizer), config=config)


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, files: Mapping[str, Path], encode: Encode, *, config: Mapping[str, Any]
) -> FittedTokenizer:
    """Check that a pipeline with an encoder's unchanged tokenizer files tokenises as training does; else add a note."""
    texts = _agreeing(files, {"config.json": json.dumps(config)}, encode, _SINGLE)
    notes = [] if len(texts) == len(_SINGLE) else [_note_on_texts(tokenizer, encode, len(texts))]
    return FittedTokenizer({}, tuple(text for text, _ in texts), tuple(notes))


def _note_on_texts(tokenizer: PreTrainedTokenizerBase, encode: Encode, agreeing: int) -> str:
    ending = tokenizer.convert_ids_to_tokens(encode(_PROBE, None)[-1])
    return (
        f"the exported tokenizer gives other tokens than training for {len(_SINGLE) - agreeing} of {len(_SINGLE)} "
        f"sample texts; training ends texts with {ending!r}"
    )


def with_padding(files: Mapping[str, Path], tokenizer: PreTrainedTokenizerBase, pad: int) -> str:
    """Text of tokenizer_config.json with padding on the right by the token with id `pad`. If that id has no token, a
    new padding token is named, to which transformers gives the first free id.
    """
    file = files.get(TOKENIZER_CONFIG)
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file else {}
    config = {key: value for key, value in config.items() if key not in _ADDED}
    config |= {"pad_token": tokenizer.convert_ids_to_tokens(pad) or NEW_PADDING, "padding_side": "right"}
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _template(tokenizer: PreTrainedTokenizerBase, encode: Encode) -> dict[str, list[int]] | None:
    """Special token ids that `encode` adds around and between texts; None if it also changes the ids of the texts."""
    inner = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    single = _around(encode(_PROBE, None), inner)
    if single is None:
        return None
    before, after = single
    pair = encode(_PROBE, _PROBE)[len(before) + len(inner) :]
    joined = _around(pair, [*inner, *after]) if pair else None
    return {"before": before, "between": joined[0] if joined else [], "after": after}


def _around(ids: Sequence[int], part: Sequence[int]) -> tuple[list[int], list[int]] | None:
    starts = (start for start in range(len(ids) - len(part) + 1) if list(ids[start : start + len(part)]) == list(part))
    begin = next(starts, None)
    return None if begin is None else (list(ids[:begin]), list(ids[begin + len(part) :]))


def _with_template(
    files: Mapping[str, Path], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, list[int]]
) -> str:
    """Text of tokenizer.json with a post-processor that adds the token ids of `template` around texts."""
    file = files.get(_TOKENIZER)
    text = file.read_text(encoding="utf-8") if file else tokenizer.backend_tokenizer.to_str()
    tree: dict[str, Any] = json.loads(text)
    old = tree.get("post_processor") or {"type": "Sequence", "processors": []}
    # A byte-level post-processor is kept: it adds no token, and corrects the offsets of tokens in the text.
    byte_level = [part for part in old.get("processors", [old]) if part["type"] == "ByteLevel"]

    def added(name: str) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": name, "type_id": 0}}] if template[name] else []

    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokens = {
        name: {"id": name, "ids": ids, "tokens": tokenizer.convert_ids_to_tokens(ids)}
        for name, ids in template.items()
        if ids
    }
    processor = {
        "type": "TemplateProcessing",
        "single": [*added("before"), first, *added("after")],
        "pair": [*added("before"), first, *added("between"), second, *added("after")],
        "special_tokens": tokens,
    }
    tree["post_processor"] = {"type": "Sequence", "processors": [*byte_level, processor]}
    return json.dumps(tree, ensure_ascii=False) + "\n"


def _agreeing(
    files: Mapping[str, Path], changed: Mapping[str, str], encode: Encode, samples: Sequence[tuple[str, str | None]]
) -> list[tuple[str, str | None]]:
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            if "/" not in name:
                copy_model_file(path, Path(folder) / name)
        for name, text in changed.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        plain = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return [(text, pair) for text, pair in samples if plain(text, pair)["input_ids"] == encode(text, pair)]

"""Ids of texts from a cache of their words equal those of the whole texts, token for token."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ds_finetune.data import text_encoder as module
from ds_finetune.data.text_encoder import text_encoder
from ds_finetune.data.tokenizer_files import load_tokenizer

REAL = ("deepseek-llm", "deepseek-coder", "deepseek-r1-distill-qwen")
_WORDS = r"?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WRITTEN = {
    "llama3": [rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]{_WORDS}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
        "\r\n"
        r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
        "\r\n"
        r"]*|\s*["
        "\r\n"
        r"]+|\s+(?!\S)|\s+",
    ],
}
"""Pre-tokenizers of models whose files are not here, as they write them; with the vocabulary of another."""
EVERY = [
    "deepseek-coder",
    *(pytest.param(n, marks=pytest.mark.slow) for n in (*REAL, *WRITTEN) if n != "deepseek-coder"),
]
ALPHABET = "aZ é57٣ .,'$+=<>|_\"\n\r\t\u00a0\u3000中ü\u0308😀²½µ、!s\u200b<|EOT|>"
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*ALPHABET, " ", " ", "  ", "the", "don't", " 'll", "<｜User｜>", "<|EOT|>", "</think>"]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=24,
).map("".join)


@cache
def tokenizer_of(name: str, shared_data: Path) -> PreTrainedTokenizerBase:
    """A real tokenizer, or one with a pre-tokenizer of WRITTEN."""
    folder = shared_data / "tokenizers"
    if name in REAL:
        return load_tokenizer(str(folder / name))
    written: dict[str, Any] = json.loads((folder / "deepseek-r1-distill-qwen" / "tokenizer.json").read_text())
    splits = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in WRITTEN[name]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    written |= {"normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(written)))


def whole(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Ids of whole texts from the tokenizer itself."""
    return [each.ids for each in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.mark.parametrize("name", EVERY)
def test_ids_by_word_are_those_of_the_whole_texts(name: str, shared_data: Path) -> None:
    tokenizer = tokenizer_of(name, shared_data)
    encoder = text_encoder(tokenizer)
    assert encoder.is_by_word

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.lists(TEXTS, max_size=8))
    def check(texts: list[str]) -> None:
        assert encoder.encode(texts) == whole(tokenizer, texts)

    check()


@pytest.mark.parametrize("name", EVERY)
def test_a_space_between_any_two_characters_is_cut_where_that_is_exact(name: str, shared_data: Path) -> None:
    characters = [chr(code) for code in range(33, 127)]
    texts = [f"{one} {two}" for one in characters for two in characters if not (one.isalnum() and two.isalnum())]
    tokenizer = tokenizer_of(name, shared_data)
    assert text_encoder(tokenizer).encode(texts) == whole(tokenizer, texts)


@pytest.mark.parametrize("name", EVERY)
def test_parts_without_a_space_between_them_are_cut_where_that_is_exact(name: str, shared_data: Path) -> None:
    characters = [*map(chr, range(33, 127)), "\n", "\t"]
    texts = [f"x {one}{two}{end}" for one in characters for two in characters for end in ("", "\n", "1", "a", "'s")]
    tokenizer = tokenizer_of(name, shared_data)
    for at in range(0, len(texts), 10_000):
        some = texts[at : at + 10_000]
        assert text_encoder(tokenizer).encode(some) == whole(tokenizer, some)


def test_added_tokens_are_found_within_words(shared_data: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "deepseek-coder"))
    tokenizer.add_tokens([AddedToken("b1"), AddedToken("c.d")])
    encoder = text_encoder(tokenizer)
    assert encoder.is_by_word
    texts = ["ab12 ab12. xc.d1", "x ab12 c.d ec.df<|EOT|>5 ab1"]
    assert encoder.encode(texts) == whole(tokenizer, texts)


def test_rows_of_a_real_data_set_have_the_ids_of_their_texts(shared_data: Path) -> None:
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines()[:300]
    texts = [text for line in lines for text in json.loads(line).values()]
    tokenizer = tokenizer_of("deepseek-coder", shared_data)
    assert text_encoder(tokenizer).encode(texts) == whole(tokenizer, texts)


def test_a_tokenizer_whose_words_are_not_known_encodes_whole_texts(shared_data: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "models" / "stories260K"))
    encoder = text_encoder(tokenizer)
    assert not encoder.is_by_word
    texts = ["Once upon a time", " there  was", ""]
    assert encoder.encode(texts) == whole(tokenizer, texts)


@pytest.mark.parametrize(
    "added", [AddedToken("<a b>"), AddedToken("<a>", lstrip=True), AddedToken("<a>", rstrip=True)], ids=str
)
def test_added_tokens_that_reach_over_a_space_end_the_cuts(added: AddedToken, shared_data: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "deepseek-coder"))
    assert text_encoder(tokenizer).is_by_word
    tokenizer.add_tokens([added])
    encoder = text_encoder(tokenizer)
    assert not encoder.is_by_word
    texts = ["x <a b> y", "x <a> y"]
    assert encoder.encode(texts) == whole(tokenizer, texts)


def test_the_cache_is_bounded(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PIECES", 3)
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "deepseek-coder"))
    encoder = text_encoder(tokenizer)
    texts = ["one two three four five six 1-2-3.4", "two three", f"a {'b' * 100} c"]
    for _ in range(2):
        assert encoder.encode(texts) == whole(tokenizer, texts)
    assert len(encoder._later) <= 3
    assert len(encoder._inner) <= 3

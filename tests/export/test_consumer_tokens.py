"""llama.cpp and ONNX Runtime GenAI read a SentencePiece tokenizer otherwise than transformers: the export chooses what
llama.cpp is told, and says what differs.

Expected tokens are those that llama.cpp (xllamacpp 2026.10) made of this vocabulary.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ds_finetune
from ds_finetune.config.schema import read_config
from ds_finetune.errors import ExportError
from ds_finetune.export.consumer_tokens import _as_elsewhere, compare_tokens, genai_note
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import resolve_here
from tests.answers_task import train_answers
from tests.export.gguf.models import save
from tests.running import tiny_task

HEADER = "{% for m in messages %}<|u|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|u|>{% endif %}"
SPACED = HEADER.replace("<|u|>{{", "<|u|> {{")
LEGACY = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}
LEGACY["normalizers"].append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
STEPS: dict[str, dict[str, Any]] = {
    "legacy": {"normalizer": LEGACY},
    "first": {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}},
    "always": {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}},
    "never": {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}},
    "strip": {"normalizer": {**LEGACY, "normalizers": [{"type": "Strip", "strip_left": True, "strip_right": True}]}},
}
STEPS["strip"]["normalizer"]["normalizers"] += LEGACY["normalizers"]


def sentencepiece(kind: str, *, template: str | None = None, strips: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and of `▁a`; `strips` makes the header's token strip white space behind it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core = Tokenizer.from_str(json.dumps(json.loads(core.to_str()) | STEPS[kind]))
    core.add_special_tokens([AddedToken("<|u|>", normalized=False, rstrip=strips)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **names)


@pytest.mark.parametrize(
    ("kind", "template", "adds_space", "differing"),
    [
        ("legacy", HEADER, True, ""),
        ("first", None, True, "1 of 7 plain texts"),
        ("first", HEADER, False, "6 of 7 plain texts"),
        ("first", SPACED, False, "6 of 7 plain texts"),
        ("always", HEADER, True, "1 of 7 chats and 1 of 7 plain texts"),
        ("always", SPACED, False, "6 of 7 plain texts"),
        ("never", HEADER, False, ""),
    ],
)
def test_llama_cpp_is_told_what_gives_the_tokens_of_chats(
    kind: str,
    template: str | None,
    adds_space: bool,
    differing: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed: pip install 'ds_finetune[gguf]'")
    made = sentencepiece(kind, template=template)
    save("llama", tmp_path / "hub", vocab_size=len(made))
    (tmp_path / "hub" / "chat_template.jinja").unlink(missing_ok=True)
    made.save_pretrained(tmp_path / "hub")
    result = ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf")
    field = gguf.GGUFReader(tmp_path / "out" / "out.gguf").fields["tokenizer.ggml.add_space_prefix"]
    assert bool(field.contents()) is adds_space
    said = [note for note in result.notes if "other tokens" in note]
    assert [differing in note for note in said] == ([True] if differing else [])


@pytest.mark.parametrize("how", [{"kind": "strip"}, {"kind": "legacy", "strips": True}])
def test_chats_that_llama_cpp_cannot_tokenise_are_refused(how: dict[str, Any], tmp_path: Path) -> None:
    """It strips no white space, neither of texts nor beside tokens."""
    pytest.importorskip("gguf", reason="the gguf extra is not installed: pip install 'ds_finetune[gguf]'")
    made = sentencepiece(**{"template": HEADER.replace("{{ m.", " {{ ' ' + m."), **how})
    save("llama", tmp_path / "hub", vocab_size=len(made))
    made.save_pretrained(tmp_path / "hub")
    with pytest.raises(ExportError, match="7 of 7 chats"):
        ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf")
    # A run that exports to GGUF is refused before its first step, unless its own template replaces the one above.
    run_file = tiny_task(tmp_path, model={"path": str(tmp_path / "hub")}, export={"formats": ["safetensors", "gguf"]})
    with pytest.raises(ExportError, match="7 of 7 chats"):
        resolve_here(read_config(run_file), World(0, 1, 0, 1, "a test"))
    (tmp_path / "own.jinja").write_text(HEADER)
    own = [f"data.template={tmp_path / 'own.jinja'}"]
    resolve_here(read_config(run_file, own), World(0, 1, 0, 1, "a test"))


READ_ELSEWHERE = {
    True: {" a": ["▁", "▁a"], "a<|u|>a": ["▁a", "<|u|>", "▁a"], "a a": ["▁a", "▁a"]},
    False: {" a": ["▁a"], "a<|u|>a": ["a", "<|u|>", "a"], "a a": ["a", "▁a"]},
}
"""Tokens of llama.cpp by `add_space_prefix`; GenAI adds the space too, as measured on a vocabulary of 512 tokens."""


@pytest.mark.parametrize("kind", ["first", "always", "never", "legacy"])
@pytest.mark.parametrize("adds_space", [False, True])
def test_the_tokens_elsewhere_are_those_that_the_programs_make(kind: str, adds_space: bool) -> None:
    core = _as_elsewhere(sentencepiece(kind, strips=True), adds_space=adds_space)
    for text, expected in READ_ELSEWHERE[adds_space].items():
        assert core.encode(text, add_special_tokens=False).tokens == expected


@pytest.mark.parametrize(
    ("kind", "differing"),
    [
        ("legacy", ""),
        ("first", "7 of 7 chats and 1 of 7 plain texts"),
        ("always", "1 of 7 chats and 1 of 7 plain texts"),
        ("never", "7 of 7 chats and 7 of 7 plain texts"),
    ],
)
def test_genai_is_said_to_differ_where_it_adds_spaces(kind: str, differing: str) -> None:
    note = genai_note(sentencepiece(kind, template=HEADER))
    assert differing in note
    assert bool(note) is bool(differing)


@pytest.mark.parametrize("name", ["deepseek-llm", "deepseek-coder", "deepseek-r1-distill-qwen"])
def test_tokenizers_that_genai_does_not_read_are_said(name: str, shared_data: Path) -> None:
    """GenAI 0.18 ends with an error about the several splits of the first two."""
    note = genai_note(AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name))
    assert ("does not read" in note) is (name != "deepseek-r1-distill-qwen")


def test_decomposed_characters_are_said(shared_data: Path) -> None:
    """Qwen's tokenizer composes them (NFC), in transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "deepseek-r1-distill-qwen")
    composed, decomposed = (unicodedata.normalize(form, "caf\xe9") for form in ("NFC", "NFD"))
    assert composed != decomposed
    assert tokenizer(composed)["input_ids"] == tokenizer(decomposed)["input_ids"]
    assert "it does not compose characters" in genai_note(tokenizer)
    assert "it does not compose characters" in compare_tokens(tokenizer, [], "llama.cpp", adds_space=False).note


def test_completions_begin_in_the_chat_template_as_in_training(tmp_path: Path) -> None:
    """The tokenizer puts a space before a text, and none behind BOS in a chat: the template writes it."""
    made = sentencepiece("first")
    save("llama", tmp_path / "base", vocab_size=len(made), max_position_embeddings=256)
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    made.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_bos_token": True}))
    rows = [{"prompt": "a", "completion": "a a"}, {"prompt": " a", "completion": "a"}]
    out = train_answers(tmp_path, rows, train={"for": "1 steps"}, data={"separator": "->"})
    tokenizer = AutoTokenizer.from_pretrained(out)
    for text in ("a", " a", "\na"):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=True)["input_ids"]
        trained = made.backend_tokenizer.encode(f"{text}->", add_special_tokens=False).ids
        assert ids == [made.bos_token_id, *trained]
    assert not (out / "UNVERIFIED").exists()

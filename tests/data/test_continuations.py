"""Answers have the tokens of their text behind the prompt, with tokenizers that put a space before a text.

Expected ids are those of the tokenizer itself for the whole text.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ds_finetune.data.documents import LengthLimit
from ds_finetune.data.messages import Conversation
from ds_finetune.data.record_layouts import Completion, PlainText
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.sample_tokens import SampleTokeniser, TemplateSettings, Tokens
from ds_finetune.data.text_encoder import TextEncoder
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.data.units import Tokenisation, tokenise_records

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
HEADERS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BARE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Tom saw a cat?"},
    {"role": "assistant", "content": "Yes, he was happy."},
    {"role": "user", "content": "And then"},
    {"role": "assistant", "content": "the day\nended  well"},
]
SCHEMES: dict[str, dict[str, Any]] = {
    "prepend": {},
    "first": {"prepend_scheme": "first", "split": False},
    "always": {"prepend_scheme": "always", "split": True},
    "unigram": {"prepend_scheme": "first", "split": True},
    "byte level": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
}


@pytest.fixture(params=SCHEMES)
def spacing(request: pytest.FixtureRequest, shared_data: Path) -> PreTrainedTokenizerBase:
    """A trained vocabulary of Llama's kind, with each step that puts a space before a text."""
    folder = shared_data / "models" / "stories260K"
    written = json.loads((folder / "tokenizer.json").read_text())
    step = {"type": "Metaspace", "replacement": "▁", **SCHEMES[request.param]}
    if SCHEMES[request.param]:
        written |= {"normalizer": None, "pre_tokenizer": step}
    if request.param == "unigram":
        pieces = sorted(written["model"]["vocab"].items(), key=lambda piece: piece[1])
        scored = [[piece, -float(number)] for number, (piece, _) in enumerate(pieces)]
        written["model"] = {"type": "Unigram", "unk_id": 0, "vocab": scored, "byte_fallback": True}
    if step["type"] == "ByteLevel":
        written["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        vocab = {piece.replace("▁", "Ġ"): number for piece, number in written["model"]["vocab"].items()}
        vocab |= {"Ċ": len(vocab)}
        merges = [[part.replace("▁", "Ġ") for part in pair] for pair in written["model"]["merges"]]
        written["model"] |= {"vocab": vocab, "merges": merges, "byte_fallback": False}
    core = Tokenizer.from_str(json.dumps(written))
    core.add_special_tokens([AddedToken(f"<|{role}|>", normalized=False) for role in ("user", "assistant")])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a whole text from the library."""
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def tokens_of(tokenizer: PreTrainedTokenizerBase, sample: Any, template: str | None = None, **how: Any) -> Tokens:
    settings = TemplateSettings(template, "assistant", "keep", **how)
    return SampleTokeniser(tokenizer, settings, bos="never").tokenise([("row 1", sample)])[0]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Tom saw a cat.\n", "He was happy.\nThe end"),
        ("Tom saw a cat.", " He was happy."),
        ("Question: a cat?\nAnswer:\n\n", "  Yes"),
        ("<|user|>Hi<|assistant|>", "Yes"),
        ("Hi</s>", " Yes"),
    ],
)
def test_a_completion_has_the_ids_of_the_whole_text(spacing: PreTrainedTokenizerBase, prompt: str, answer: str) -> None:
    sample = Completion(prompt, answer, Conversation(()))
    tokens = tokens_of(spacing, sample, separator="")
    assert tokens.ids == ids_of(spacing, f"{prompt}{answer}</s>")
    first = tokens.mask.index(True)
    assert tokens.ids[:first] == ids_of(spacing, prompt)
    assert tokens.mask == [False] * first + [True] * (len(tokens.ids) - first)
    assert "joined" not in tokens.notes
    if "<" not in prompt:
        assert spacing.decode(tokens.ids).removeprefix(" ") == f"{prompt}{answer}</s>"


@pytest.mark.parametrize(("prompt", "answer"), [("Tom saw a ca", "t and"), ("Tom saw ", "a cat")])
def test_no_token_has_characters_of_prompt_and_answer(
    spacing: PreTrainedTokenizerBase, prompt: str, answer: str
) -> None:
    whole = ids_of(spacing, f"{prompt}{answer}</s>")
    served = ids_of(spacing, prompt)
    assert whole[: len(served)] != served, "the case has no such token"
    tokens = tokens_of(spacing, Completion(prompt, answer, Conversation(())), separator="")
    assert tokens.ids[: len(served)] == served
    assert tokens.mask == [False] * len(served) + [True] * (len(tokens.ids) - len(served))
    assert spacing.decode(tokens.ids).removeprefix(" ") == f"{prompt}{answer}</s>"
    assert tokens.notes == ("joined",)


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_joined_answer_makes_a_later_prompt_another_than_the_servers(
    spacing: PreTrainedTokenizerBase, train_on: str
) -> None:
    template = LLAMA.replace("[/INST]", "[/INST] ").replace("%} {{ m.content", "%}{{ m.content")
    settings = TemplateSettings(template, train_on, "keep")
    whole, first = SampleTokeniser(spacing, settings).tokenise(
        [("row 1", Conversation((*TURNS[2:], *TURNS[2:]))), ("row 2", Conversation(tuple(TURNS[2:])))]
    )
    assert (whole.notes, first.notes) == (("joined",), ("joined",))
    assert (whole.server_prompt_differs, first.server_prompt_differs) == (True, False)


@pytest.mark.parametrize("template", [LLAMA, HEADERS, BARE])
def test_chats_have_the_ids_of_the_whole_text(spacing: PreTrainedTokenizerBase, template: str) -> None:
    def rendered(turns: list[dict[str, Any]], *, opens: bool = False) -> str:
        return str(
            spacing.apply_chat_template(turns, chat_template=template, tokenize=False, add_generation_prompt=opens)
        )

    tokens = tokens_of(spacing, Conversation(tuple(TURNS)), template)
    assert tokens.ids == ids_of(spacing, rendered(TURNS))
    assert (tokens.notes, tokens.server_prompt_differs) == ((), False)
    served = ids_of(spacing, rendered(TURNS[:3], opens=True))
    last = len(tokens.mask) - tokens.mask[::-1].index(True)
    assert tokens.ids[: len(served)] == served
    assert all(tokens.mask[len(served) : last])
    assert not tokens.mask[len(served) - 1]


def test_pairs_and_marked_answers_have_the_ids_of_the_whole_text(spacing: PreTrainedTokenizerBase) -> None:
    rows = {
        "pairs": {"prompt": "Tom saw a cat.\n", "chosen": "He was happy.", "rejected": "The end"},
        "marked": {"prompt": "Tom saw a cat.\n", "completion": "He was happy.", "label": True},
    }
    for name, row in rows.items():
        settings = TemplateSettings(None, "assistant", "keep")
        kind = RowKind(name, "dpo" if name == "pairs" else "kto")  # type: ignore[arg-type]
        how = Tokenisation(spacing, settings, "auto", {}, LengthLimit(512, "auto"), kind)
        documents, _ = tokenise_records([("row 1", row)], how)
        answers = [row[key] for key in ("chosen", "rejected", "completion") if key in row]
        begin = ids_of(spacing, "<s>") if spacing("x")["input_ids"][0] == spacing.bos_token_id else []
        wanted = [i for answer in answers for i in [*begin, *ids_of(spacing, f"{row['prompt']}{answer}</s>")]]
        assert documents.ids.tolist() == wanted


def test_a_text_behind_a_control_token_that_is_text_gets_no_space(spacing: PreTrainedTokenizerBase) -> None:
    turns = [{"role": "user", "content": "cat</s>cat"}, TURNS[1]]
    if type(spacing.backend_tokenizer.model).__name__ == "Unigram":
        pytest.skip("a Unigram model makes the token `</s>` of the text itself")
    tokens = tokens_of(spacing, Conversation(tuple(turns)), HEADERS)
    assert "cat</s>cat</s>" in spacing.decode(tokens.ids)
    assert tokens.ids.count(spacing.eos_token_id) == 2


@pytest.mark.parametrize("text", ["Tom saw a cat.</s>", "</s>"])
def test_a_text_that_ends_in_the_eos_token_gets_no_second_one(spacing: PreTrainedTokenizerBase, text: str) -> None:
    assert tokens_of(spacing, PlainText(text)).ids == ids_of(spacing, text)
    sample = Completion("Tom saw\n", text, Conversation(()))
    assert tokens_of(spacing, sample, separator="").ids == ids_of(spacing, f"Tom saw\n{text}")


@pytest.mark.parametrize(
    "added", [AddedToken("<a>"), AddedToken("<a>", lstrip=True), AddedToken("<a>", rstrip=True)], ids=str
)
def test_a_text_after_an_added_token_has_the_ids_of_the_whole_text(added: AddedToken, shared_data: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "deepseek-coder"))
    tokenizer.add_tokens([added])
    before, text = "x <a>", "\n y1 z"
    ((ids, is_merged),) = TextEncoder(tokenizer.backend_tokenizer).encode([(text, before)])
    start, whole = ids_of(tokenizer, before), ids_of(tokenizer, before + text)
    assert is_merged == (whole[: len(start)] != start)
    assert [*start, *ids] == whole

"""Exact tokens and masks with real tokenizers and templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.data.record_layouts import Completion, Conversation, PlainText
from ds_finetune.data.sample_tokens import SampleTokeniser, TemplateSettings, Tokens
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import DataError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SEPARATOR = "\n__ggml_vocab_test__\n"
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.fixture(scope="module")
def tokenizers(shared_data: Path) -> Path:
    return shared_data / "tokenizers"


@pytest.fixture(scope="module")
def r1(tokenizers: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tokenizers / "deepseek-r1-distill-qwen"))


@pytest.fixture(scope="module")
def llm(tokenizers: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tokenizers / "deepseek-llm"))


def chatml(tokenizer: PreTrainedTokenizerBase, *tokens: str) -> PreTrainedTokenizerBase:
    """The tokenizer with further special tokens, for templates of other vocabularies."""
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer


def templated(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]], template: str | None = None, **settings: Any
) -> Tokens:
    chosen = TemplateSettings(
        template or tokenizer.chat_template, **({"train_on": "assistant", "reasoning": "keep"} | settings)
    )  # type: ignore[arg-type]
    return SampleTokeniser(tokenizer, chosen).tokenise([("row 1", Conversation(tuple(turns)))])[0]


def supervised_texts(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The supervised stretches as text."""
    stretches: list[list[int]] = []
    for place, (token, is_learnt) in enumerate(zip(tokens.ids, tokens.mask, strict=True)):
        if is_learnt:
            if place == 0 or not tokens.mask[place - 1]:
                stretches.append([])
            stretches[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize(
    ("folder", "vectors"),
    [
        ("deepseek-llm", "deepseek-llm"),
        ("deepseek-coder", "deepseek-coder"),
        ("deepseek-r1-distill-qwen", "deepseek-r1-qwen"),
    ],
)
def test_ids_are_the_published_ones(tokenizers: Path, folder: str, vectors: str) -> None:
    files = tokenizers / "vectors"
    with (files / f"ggml-vocab-{vectors}.gguf.inp").open(encoding="utf-8", newline="") as file:
        cases = file.read().split(SEPARATOR)
    wanted = [
        [int(i) for i in line.split()] for line in (files / f"ggml-vocab-{vectors}.gguf.out").read_text().split("\n")
    ]
    tokenizer = load_tokenizer(str(tokenizers / folder))
    settings = TemplateSettings(None, "assistant", "keep")
    found = SampleTokeniser(tokenizer, settings).tokenise([("case", PlainText(case)) for case in cases])
    start = [tokenizer.bos_token_id] if found[0].ids[0] == tokenizer.bos_token_id else []
    assert [tokens.ids for tokens in found] == [[*start, *ids, tokenizer.eos_token_id] for ids in wanted[: len(cases)]]


def test_r1_distill_keeps_reasoning_and_opens_it_in_the_prompt(r1: PreTrainedTokenizerBase) -> None:
    tokens = templated(r1, TURNS[:3])
    assert r1.decode(tokens.ids) == f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜><think>\nhm\n</think>\n\nHello!{EOS}"
    assert supervised_texts(tokens, r1) == [f"hm\n</think>\n\nHello!{EOS}"]
    assert not tokens.server_prompt_differs


def test_r1_distill_with_two_turns(r1: PreTrainedTokenizerBase) -> None:
    tokens = templated(r1, TURNS)
    assert supervised_texts(tokens, r1) == [f"hm\n</think>\n\nHello!{EOS}", f"4{EOS}"]
    assert tokens.server_prompt_differs  # the second answer has no reasoning, and a server would open one


def test_reasoning_can_be_stripped(llm: PreTrainedTokenizerBase) -> None:
    assert supervised_texts(templated(llm, TURNS, reasoning="strip"), llm) == [f" Hello!{EOS}", f" 4{EOS}"]


def test_which_turns_are_supervised(llm: PreTrainedTokenizerBase) -> None:
    assert supervised_texts(templated(llm, TURNS, train_on="last_assistant"), llm) == [f" 4{EOS}"]
    whole = templated(llm, TURNS, train_on="all")
    assert whole.mask == [True] * len(whole.ids)


def test_r1_distill_tool_call(r1: PreTrainedTokenizerBase) -> None:
    tokens = templated(r1, TOOL_TURNS)
    head = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add"
    assert supervised_texts(tokens, r1) == [
        f'{head}\n```json\n{{"a": 2, "b": 2}}\n```<｜tool▁call▁end｜>',
        f"It is 4.{EOS}",
    ]
    assert tokens.notes == ("open_call",)  # this template ends a call without the eos token that ends its other turns


TEMPLATES: dict[str, list[str]] = {
    "llama-cpp-deepseek-r1.jinja": [f"hm\n</think>\n\nHello!{EOS}", f"4{EOS}"],
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja": [f"hm\n</think>\n\nHello!{EOS}", f"4{EOS}"],
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja": [f"hm\n</think>\n\nHello!{EOS}", f"4{EOS}"],
    "deepseek_v3_tokenizer_config.json": [f"<think>\nhm\n</think>\n\nHello!{EOS}", f"4{EOS}"],
    "Qwen-Qwen2.5-7B-Instruct.jinja": ["<think>\nhm\n</think>\n\nHello!<|im_end|>", "4<|im_end|>"],
    "qwen3_tokenizer_config.json": ["<think>\nhm\n</think>\n\nHello!<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_supervised_text_and_server_prompt_of_each_template(tokenizers: Path, name: str) -> None:
    file = tokenizers / "chat_templates" / name
    template = json.loads(file.read_text())["chat_template"] if file.suffix == ".json" else file.read_text()
    tokenizer = chatml(load_tokenizer(str(tokenizers / "deepseek-r1-distill-qwen")), "<|im_start|>", "<|im_end|>")
    tokens = templated(tokenizer, TURNS, template)
    assert supervised_texts(tokens, tokenizer) == TEMPLATES[name]
    server = tokenizer.apply_chat_template(
        TURNS[:2], chat_template=template, add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(server, add_special_tokens=False)["input_ids"]
    assert tokens.ids[: len(prompt)] == prompt
    assert not any(tokens.mask[: len(prompt)])
    assert tokens.mask[len(prompt)]
    assert tokens.ids.count(tokenizer.bos_token_id) == tokenizer.decode(prompt).count(BOS) <= 1


def test_plain_completion_and_text(llm: PreTrainedTokenizerBase) -> None:
    settings = TemplateSettings(None, "assistant", "keep")
    asked = Completion("2+2=", "4", Conversation(()))
    completion, text = SampleTokeniser(llm, settings).tokenise([("a", asked), ("b", PlainText("Once"))])
    assert llm.decode(completion.ids) == f"{BOS}2+2=\n4{EOS}"
    assert supervised_texts(completion, llm) == [f"4{EOS}"]
    assert llm.decode(text.ids) == f"{BOS}Once{EOS}"
    assert supervised_texts(text, llm) == [f"Once{EOS}"]


@pytest.mark.parametrize(
    ("turns", "template", "message"),
    [
        (
            TURNS[1:3],
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
            "row 1: the chat template ends an assistant turn with '\\n'",
        ),
        (
            TURNS[1:3],
            "{{ bos_token * 2 }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
            f"is a second {BOS}",
        ),
        (TURNS[1:3], "{{ raise_exception('no') }}", "row 1: the chat template refuses the row: no"),
        (TURNS[1:3], "{% for m in messages %}{{ m.content }}{% endfor %}", "ends an assistant turn with ''"),
    ],
)
def test_templates_that_cannot_be_trained_on(
    r1: PreTrainedTokenizerBase, turns: list[dict[str, Any]], template: str | None, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        templated(r1, turns, template)
    assert message in caught.value.message


@pytest.mark.parametrize("written", ["tojson", "e", "replace('\\n', ' ')"])
def test_a_template_that_changes_answers_is_refused(written: str, llm: PreTrainedTokenizerBase) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | CHANGE }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": 'say "a"\n& go'}]
    changed = source.replace("CHANGE", written)
    assert turns[1]["content"] not in llm.apply_chat_template(turns, chat_template=changed, tokenize=False)
    with pytest.raises(DataError, match="row 1: the chat template changes the texts of answers, as in "):
        templated(llm, turns, changed)
    assert supervised_texts(templated(llm, turns, source.replace("CHANGE", "trim")), llm) == [f'say "a"\n& go{EOS}']

"""Rows of tool calls in the form that each peer documents: exact tokens by transformers' own rendering of one form."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.data.messages import Conversation
from ds_finetune.data.sample_tokens import SampleTokeniser, TemplateSettings, Tokens
from ds_finetune.errors import DataError
from tests.data.reading import sample_of

QWEN = "Qwen-Qwen2.5-7B-Instruct.jinja"
QWEN3 = "qwen3_tokenizer_config.json"
ASK = "How is the weather in Beijing and Shanghai?"
CITIES = [{"name": "get_weather", "arguments": {"city": city}} for city in ("Beijing", "Shanghai")]
CALLS = [{"type": "function", "function": call} for call in CITIES]
RESULTS = ['{"temp": 21, "sky": "clear"}', '{"temp": 24, "sky": "rain"}']
SAY, ANSWER = "I look it up.", "Beijing is clear, and Shanghai has rain."
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": TOOL}]
USER, LAST = {"role": "user", "content": ASK}, {"role": "assistant", "content": ANSWER}
TOOL_TURNS = [{"role": "tool", "content": result} for result in RESULTS]
PLAIN = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, *TOOL_TURNS, LAST]
TEXT = [USER, {"role": "assistant", "content": SAY, "tool_calls": CALLS}, *TOOL_TURNS, LAST]
AS_JSON = [json.dumps(call) for call in CITIES]
TYPED = [
    {"id": f"call_{n}", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
    for n, call in enumerate(CITIES)
]
ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "TRL": (
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": CALLS},
                *({"role": "tool", "name": "get_weather", "content": result} for result in RESULTS),
                LAST,
            ],
            "tools": json.dumps(TOOLS),
        },
        PLAIN,
    ),
    "OpenAI": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": TYPED},
                *({"role": "tool", "tool_call_id": f"call_{n}", "content": r} for n, r in enumerate(RESULTS)),
                LAST,
            ],
            "tools": TOOLS,
        },
        PLAIN,
    ),
    "axolotl": ({"messages": [USER, {"role": "assistant", "content": SAY, "tool_calls": CALLS}, *TOOL_TURNS, LAST], "tools": TOOLS}, TEXT),
    "ms-swift": (
        {
            "tools": json.dumps(TOOLS),
            "messages": [
                USER,
                *({"role": "tool_call", "content": call} for call in AS_JSON),
                *({"role": "tool_response", "content": result} for result in RESULTS),
                LAST,
            ],
        },
        PLAIN,
    ),
    "ms-swift with text before the calls": (
        {
            "tools": json.dumps(TOOLS),
            "messages": [
                USER,
                {"role": "assistant", "content": SAY},
                *({"role": "tool_call", "content": call} for call in AS_JSON),
                *({"role": "tool", "content": result} for result in RESULTS),
                LAST,
            ],
        },
        TEXT,
    ),
    "LLaMA-Factory": (
        {
            "conversations": [
                {"from": "human", "value": ASK},
                {"from": "function_call", "value": json.dumps(CITIES)},
                *({"from": "observation", "value": result} for result in RESULTS),
                {"from": "gpt", "value": ANSWER},
            ],
            "tools": json.dumps([TOOL]),
        },
        PLAIN,
    ),
    "LLaMA-Factory with text before the call": (
        {
            "conversations": [
                {"from": "human", "value": ASK},
                {"from": "gpt", "value": SAY},
                {"from": "function_call", "value": json.dumps(CITIES)},
                *({"from": "observation", "value": result} for result in RESULTS),
                {"from": "gpt", "value": ANSWER},
            ],
            "tools": json.dumps([TOOL]),
        },
        TEXT,
    ),
    "LLaMA-Factory with typed parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": ASK[:9]}, {"type": "text", "value": ASK[9:]}]},
                {"role": "assistant", "content": [
                    *({"type": "text", "value": text} for text in (SAY[:4], SAY[4:])),
                    *({"type": "tool_call", "value": call} for call in AS_JSON),
                ], "loss_weight": 1.0},
                *({"role": "tool", "content": [{"type": "text", "value": result}]} for result in RESULTS),
                {"role": "assistant", "content": [{"type": "text", "value": ANSWER}]},
            ],
            "tools": json.dumps(TOOLS),
        },
        TEXT,
    ),
    "OpenAI, a message for each call": (
        {
            "messages": [USER, *({"role": "assistant", "tool_calls": [call]} for call in TYPED), *TOOL_TURNS, LAST],
            "tools": TOOLS,
        },
        PLAIN,
    ),
    "two texts": (
        {"messages": [USER, {"role": "assistant", "content": SAY}, LAST]},
        [USER, {"role": "assistant", "content": f"{SAY}\n{ANSWER}"}],
    ),
}  # fmt: skip
"""A row of each peer, and its turns as transformers takes them."""


def tokens_of(row: dict[str, Any], template: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    sample = sample_of(row)
    assert isinstance(sample, Conversation)
    return SampleTokeniser(tokenizer, TemplateSettings(template, "assistant", "keep")).tokenise([("row 1", sample)])[0]


@pytest.mark.parametrize("name", ROWS)
def test_each_peers_row_is_one_assistant_turn_with_text_and_all_calls(
    name: str, chat_tokenizer: PreTrainedTokenizerBase, chat_templates: dict[str, str]
) -> None:
    row, turns = ROWS[name]
    template = chat_templates[QWEN]
    tokens = tokens_of(row, template, chat_tokenizer)
    rendered = chat_tokenizer.apply_chat_template(
        turns, tools=TOOLS if "tools" in row else None, chat_template=template, tokenize=False
    )
    assert chat_tokenizer.decode(tokens.ids) == rendered
    assert tokens.ids == chat_tokenizer(rendered, add_special_tokens=False)["input_ids"]
    answers = [part.partition("<|im_end|>")[0] for part in rendered.split("<|im_start|>assistant\n")[1:]]
    wanted = [f"{answer}<|im_end|>" for answer in answers]
    assert len(wanted) == sum(turn["role"] == "assistant" for turn in turns)
    supervised = [i for i, is_learnt in zip(tokens.ids, tokens.mask, strict=True) if is_learnt]
    assert chat_tokenizer.decode(supervised) == "".join(wanted)
    assert not tokens.server_prompt_differs


def test_reasoning_parts_are_the_reasoning_that_the_template_writes(
    chat_tokenizer: PreTrainedTokenizerBase, chat_templates: dict[str, str]
) -> None:
    parts = [
        {"type": "reasoning", "value": "I add. "},
        {"type": "reasoning", "value": "2+2=4"},
        {"type": "text", "value": "4"},
    ]
    tokens = tokens_of(
        {"messages": [USER, {"role": "assistant", "content": parts}]}, chat_templates[QWEN3], chat_tokenizer
    )
    answer = {"role": "assistant", "content": "4", "reasoning_content": "I add. 2+2=4"}
    rendered = chat_tokenizer.apply_chat_template([USER, answer], chat_template=chat_templates[QWEN3], tokenize=False)
    assert "I add. 2+2=4\n</think>" in rendered
    assert chat_tokenizer.decode(tokens.ids) == rendered
    with pytest.raises(
        DataError, match="message 2 of `messages` has the parts text, reasoning, reasoning, which no chat template"
    ):
        sample_of({"messages": [USER, {"role": "assistant", "content": [parts[2], *parts[:2]]}]})


THINK = {"role": "assistant", "content": "So.", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (
            [{"role": "assistant", "tool_calls": CALLS}, LAST],
            "message 3 of `messages` continues an assistant message, but no result",
        ),
        ([LAST, THINK], "message 3 of `messages` continues an assistant message, but it begins with new"),
        ([{**LAST, "weight": 0}, LAST], "message 3 of `messages` continues an assistant message, but only one"),
    ],
)
def test_messages_that_are_no_turn_together_are_refused(turns: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        sample_of({"messages": [USER, *turns]})


def test_untrained_turns_of_a_prompt_are_counted_as_turns() -> None:
    calls = [{"role": "tool_call", "content": call} for call in AS_JSON]
    sample = sample_of({"prompt": [USER, *calls, *TOOL_TURNS], "completion": [LAST]})
    assert isinstance(sample, Conversation)
    assert [turn.get("weight", 1) for turn in sample.messages] == [1, 0, 1, 1, 1]
    with pytest.raises(DataError, match="the prompt ends with an assistant turn"):
        sample_of({"prompt": [USER, *calls], "completion": [LAST]})

"""Rows in one form: what is read of messages, tools and other columns, and what is refused by name."""

import json
from typing import Any

import pytest

from ds_finetune.data.record_layouts import LAYOUTS, Conversation, unread_columns
from ds_finetune.errors import DataError
from tests.data.reading import sample_of

ASKED = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4"}
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}


def conversation_of(record: dict[str, Any]) -> Conversation:
    sample = sample_of(record)
    assert isinstance(sample, Conversation)
    return sample


def message_of(message: dict[str, Any]) -> dict[str, Any]:
    """A message between two others, in one form."""
    return dict(conversation_of({"messages": [ASKED, message, ASKED, SAID]}).messages[1])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, {"role": "user", "content": "a\nb"}),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "function", "content": "x", "name": "add"}, {"role": "tool", "content": "x", "name": "add"}),
        ({**SAID, "reasoning": "hm", "tool_calls": None}, {**SAID, "reasoning_content": "hm"}),
        ({**SAID, "weight": 0, "tool_calls": []}, {**SAID, "weight": 0}),
        ({**SAID, "weight": 1}, SAID),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
        (
            {"role": "assistant", "function_call": {"name": "add", "arguments": {"a": 2}}},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
            },
        ),
        (
            {"role": "assistant", "tool_calls": json.dumps([CALL])},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
    ],
)
def test_messages_in_one_form(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert message_of(given) == wanted


@pytest.mark.parametrize("tools", [[FUNCTION], [TOOL], json.dumps([FUNCTION])])
@pytest.mark.parametrize("layout", ["messages", "sharegpt", "prompt_completion"])
def test_tools_of_every_layout_are_carried(tools: object, layout: str) -> None:
    records = {
        "messages": {"messages": [ASKED, SAID]},
        "sharegpt": {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        "prompt_completion": {"prompt": [ASKED], "completion": [SAID]},
    }
    found = conversation_of({**records[layout], "tools": tools})
    assert found.tools == (TOOL,)
    assert found.messages == (ASKED, SAID)


def test_a_function_call_of_sharegpt_is_a_tool_call() -> None:
    turns = [
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a":2}}'},
    ]
    call = conversation_of({"conversations": turns}).messages[1]
    assert call == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
    }


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}, SAID]}, "message 1 of `messages` has a part of type 'image_url'"),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": ["text"], "value": "4"}]}]}, "has a part of type ['text']"),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "tool_call", "value": "4"}]}]}, "has the tool call int 4"),
        ({"messages": [ASKED, SAID], "images": ["x.png"]}, "row 1 has media in column `images`"),
        ({"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "4"}], "images": ["x.png"]}, "row 1 has media in column `images`"),
        ({"instruction": "<image>?", "input": "", "output": "4", "images": ["x.png"]}, "row 1 has media in column `images`"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "completion": [SAID], "images": [{"bytes": b"x"}]}, "row 1 has media in column `images`"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "completion": [SAID], "images": []}, "has a part of type 'image'"),
        ({"messages": [ASKED, {**SAID, "weight": 0.5}]}, "message 2 of `messages` has weight 0.5"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "an assistant message has neither content nor tool calls"),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "`arguments` of f is not JSON"),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}, "is str '[1]', not an object"),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1,"a":2}'}}]}]}, "the key 'a' is repeated in one object"),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{"type": "custom", "name": "f"}]}]}, "which has no function with a name"),
        ({"messages": [{**ASKED, "tool_calls": [CALL]}, SAID]}, "a user message has `tool_calls`"),
        ({"messages": [ASKED, SAID], "tools": "[broken"}, "row 1: `tools` is not JSON"),
        ({"messages": [ASKED, SAID], "tools": [{"type": "function"}]}, "row 1: tool 1 is dict"),
        ({"messages": [{"role": "user", "content": "a\ud800"}, SAID]}, "contains the lone surrogate U+D800"),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud800"}'}]}]}, "contains the lone surrogate U+D800"),
        ({"text": "a\udfff"}, "row 1: column `text` contains the lone surrogate U+DFFF"),
        ({"text": "a\ue0f1"}, "row 1: column `text` contains the private-use character U+E0F1"),
        ({"messages": "x"}, "row 1: `messages` is str 'x'"),
        ({"messages": ["x"]}, "message 1 of `messages` is str 'x', not an object"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "row 1: unknown role ['user'] in message 1 of `messages`"),
        ({"messages": [{"role": "user", "content": 5}]}, "the content is int 5, not text"),
        ({"messages": [{"role": "tool", "content": None}]}, "the content is null, not text"),
        ({"conversations": {"a": 1}}, "row 1: `conversations` is dict"),
        ({"conversations": [{"from": "function_call", "value": "add(2)"}]}, "the tool call is not JSON"),
        ({"instruction": "i", "output": "o", "input": 5}, "column `input` is int 5, not text"),
        ({"instruction": "i", "output": "o", "history": ["q"]}, "column `history` is ['q']"),
        ({"conversations": [], "chosen": {}, "rejected": {}}, "row 1 is a preference row"),
        ({"prompt": "p", "completion": "c", "label": True}, "row 1 is a KTO row"),
        ({"messages": [ASKED, SAID], "kto_tag": 1}, "row 1 is a KTO row"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_trained_are_refused_by_name(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        conversation_of(record)
    assert message in caught.value.message
    assert caught.value.message.startswith("row 1")
    assert caught.value.hint


def test_messages_written_as_text_are_told_to_leave_csv() -> None:
    with pytest.raises(DataError) as caught:
        conversation_of({"messages": '[{"role": "user"}]'})
    assert "CSV has no lists" in caught.value.hint


def test_one_answer_of_a_preference_row_is_imitated_where_it_is_named() -> None:
    record = {"prompt": "p", "chosen": "c", "rejected": "r"}
    columns = {"completion": "chosen"}
    sample_of(record, columns=columns)
    assert unread_columns(record, LAYOUTS["prompt_completion"], columns) == ["rejected"]


def test_columns_and_fields_that_are_not_used() -> None:
    record = {"messages": [{**ASKED, "likes": 3}, {**SAID, "name": "bot"}], "source": "x", "split": None, "tools": []}
    assert unread_columns(record, LAYOUTS["messages"], {}) == ["source"]
    assert conversation_of(record).unread == ("messages[].likes", "messages[].name")
    record, columns = {"q": "x", "answer": "y", "prompt": "z"}, {"prompt": "q", "completion": "answer"}
    assert unread_columns(record, LAYOUTS["prompt_completion"], columns) == ["prompt"]

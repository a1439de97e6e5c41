"""Turns with real chat templates: what is supervised, which rows are dropped for which reason, and the report."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ds_finetune.config.sections import DataConfig
from ds_finetune.data.chat_template import ChatTemplate
from ds_finetune.data.documents import Counts
from ds_finetune.data.messages import read_conversation
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.record_layouts import Completion, Conversation, PlainText
from ds_finetune.data.row_report import row_notes, server_prompt_line
from ds_finetune.data.sample_tokens import SampleTokeniser, TemplateSettings, Tokens
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.trainer.preview import mark_supervised
from tests.data.reading import sample_of

QWEN2, QWEN3 = "Qwen-Qwen2.5-7B-Instruct.jinja", "qwen3_tokenizer_config.json"
HERMES = "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja"
R1, V3, LLM = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja", "deepseek_v3_tokenizer_config.json", "deepseek-llm"
EOS = "<｜end▁of▁sentence｜>"
LIMITS = TokenLimits(256, 200_000)
ASKED, RESULT, SAID = (
    {"role": "user", "content": "2+2?"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
)
CALL = {"function": {"name": "add", "arguments": '{"a":2, "b":"\\u00e9"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOLS = [{"name": "add", "description": "Adds two numbers.", "parameters": {"type": "object", "properties": {}}}]


class Chat:
    """Tokens of messages under a template by name, and texts of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, templates: dict[str, str]) -> None:
        self.tokenizer, self._templates = tokenizer, templates

    def tokens(self, name: str, messages: list[dict[str, Any]], tools: object = None, **settings: Any) -> Tokens:
        chosen = TemplateSettings(self._templates[name], **({"train_on": "assistant", "reasoning": "keep"} | settings))
        sample = read_conversation(messages, tools, "messages", "row 1")
        return SampleTokeniser(self.tokenizer, chosen).tokenise([("row 1", sample)])[0]

    def shown(self, tokens: Tokens) -> str:
        return mark_supervised(tokens.ids, tokens.mask, self.tokenizer).plain.rstrip("\n")

    def supervised(self, *given: Any, **settings: Any) -> list[str]:
        return [part.split("⟧")[0] for part in self.shown(self.tokens(*given, **settings)).split("⟦")[1:]]


@pytest.fixture(scope="module")
def chat(chat_tokenizer: PreTrainedTokenizerBase, chat_templates: dict[str, str]) -> Chat:
    return Chat(chat_tokenizer, chat_templates)


CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "é"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("name", "call", "answer"),
    [
        (QWEN2, CALL_TEXT, "It is 4.<|im_end|>"),
        (QWEN3, f"<think>\n\n</think>\n\n{CALL_TEXT}", "<think>\n\n</think>\n\nIt is 4.<|im_end|>"),
        (HERMES, CALL_TEXT, "It is 4.<|im_end|>"),
    ],
)
def test_a_tool_call_is_supervised_through_its_end_without_header_and_newline(
    chat: Chat, name: str, call: str, answer: str
) -> None:
    assert chat.supervised(name, [ASKED, CALLS, RESULT, SAID], TOOLS) == [call, answer]
    shown = chat.shown(chat.tokens(name, [ASKED, CALLS, RESULT, SAID], TOOLS))
    assert f"<|im_start|>assistant\n⟦{call}⟧\n<|im_start|>" in shown
    assert "Adds two numbers." in shown


def test_text_beside_a_tool_call(chat: Chat) -> None:
    both = {**CALLS, "content": "Let me add."}
    assert chat.supervised(QWEN2, [ASKED, both], TOOLS) == [f"Let me add.\n{CALL_TEXT}"]
    assert chat.tokens(R1, [ASKED, both]).dropped == "calls"
    assert chat.tokens(HERMES, [ASKED, both], TOOLS).dropped == "text"
    assert chat.tokens(R1, [ASKED, {**CALLS, "content": ""}]).dropped == ""


STRICT = """{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}
{% endif %}[CALL]{{ c.function | tojson }}{% endfor %}{{ eos_token }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}
{% if m.role == 'assistant' and not m.tool_calls %}{{ eos_token }}{% endif %}{% endfor %}"""
WRITES_NONE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}[CALL]{{ c.function | tojson }}{% endfor %}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}"
)


@pytest.mark.parametrize("source", [STRICT, WRITES_NONE])
def test_probes_find_the_form_of_tool_calls_that_a_template_renders(
    chat_tokenizer: PreTrainedTokenizerBase, source: str
) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "abcdefghi"}]}
    chat = Chat(chat_tokenizer, {"own": source})
    (call, answer) = chat.supervised("own", [ASKED, calls, RESULT, SAID])
    assert '[CALL]{"name": "add", "arguments": {"a": 2, "b": "é"}}' in call
    assert "None" not in call
    assert answer.endswith(f"It is 4.{EOS}")


def test_a_row_with_calls_after_the_end_of_a_turn_is_dropped(chat: Chat) -> None:
    """R1's template ends the turn behind the second call of three."""
    assert chat.tokens(R1, [ASKED, {**CALLS, "tool_calls": [CALL] * 3}]).dropped == "calls"
    assert chat.supervised(R1, [ASKED, {**CALLS, "tool_calls": [CALL] * 2}])[0].endswith(f"<｜tool▁calls▁end｜>{EOS}")


@pytest.mark.parametrize("name", [R1, V3, LLM, QWEN2])
def test_templates_that_ignore_tools_or_reasoning_are_reported(chat: Chat, name: str) -> None:
    thought = {**SAID, "reasoning_content": "2 and 2"}
    assert chat.tokens(name, [ASKED, SAID], TOOLS).notes == (() if name == QWEN2 else ("tools",))
    assert chat.tokens(name, [ASKED, thought]).dropped == ("" if name == R1 else "reasoning")
    assert chat.tokens(name, [ASKED, thought], reasoning="strip").dropped == ""


@pytest.mark.parametrize(("branch", "is_noted"), [("{% else %}", True), ("{% elif m.role == 'assistant' %}", False)])
def test_a_template_that_writes_other_roles_as_answers_is_reported(
    branch: str, is_noted: bool, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Templates with two branches write a system message as an answer of the model, or leave it out."""
    body = "{% if m.role == 'user' %}Q: {{ m.content }} " + branch + f"A: {{{{ m.content }}}}{EOS}{{% endif %}}"
    template = "{% for m in messages %}" + body + "{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    two = Chat(chat_tokenizer, {"two": template})
    tokens = two.tokens("two", [{"role": "system", "content": "Be nice."}, ASKED, SAID])
    assert ("as_answer" in tokens.notes, tokens.dropped) == ((True, "") if is_noted else (False, "text"))
    assert "as_answer" not in two.tokens("two", [ASKED, SAID]).notes


def test_a_system_message_that_only_the_first_place_renders_is_no_answer(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    body = "{% if loop.first and m.role == 'system' %}S: {{ m.content }} {% elif m.role == 'user' %}Q: {{ m.content }} "
    body += f"{{% else %}}A: {{{{ m.content }}}}{EOS}{{% endif %}}"
    template = "{% for m in messages %}" + body + "{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    system, chat = {"role": "system", "content": "Be nice."}, Chat(chat_tokenizer, {"first": template})
    assert "as_answer" not in chat.tokens("first", [system, ASKED, SAID]).notes
    assert "as_answer" in chat.tokens("first", [ASKED, SAID, system, ASKED, SAID]).notes


def test_reasoning_in_a_field_is_rendered_as_the_template_knows_it(chat: Chat) -> None:
    thought = {**SAID, "reasoning_content": "2 and 2"}
    assert chat.supervised(QWEN3, [ASKED, thought]) == ["<think>\n2 and 2\n</think>\n\nIt is 4.<|im_end|>"]
    # Without a question Qwen3's template writes no reasoning.
    assert chat.tokens(QWEN3, [{"role": "system", "content": "Think."}, thought]).dropped == "reasoning"
    tokens = chat.tokens(R1, [ASKED, thought])
    assert chat.shown(tokens).endswith(f"<｜Assistant｜><think>\n⟦2 and 2\n</think>\n\nIt is 4.{EOS}⟧")
    assert not tokens.server_prompt_differs


@pytest.mark.parametrize("name", [QWEN2, QWEN3, V3, R1, LLM])
def test_an_answer_before_any_question_trains_no_prompt(chat: Chat, name: str) -> None:
    first = chat.supervised(name, [{"role": "assistant", "content": "Hello!"}, ASKED, SAID])[0]
    assert first.strip().startswith("Hello!")
    assert chat.tokens(name, [{"role": "assistant", "content": "Hello!"}, ASKED, SAID]).server_prompt_differs


def test_weight_0_is_not_trained(chat: Chat) -> None:
    assert chat.supervised(V3, [ASKED, {**SAID, "weight": 0}, ASKED, {"role": "assistant", "content": "Four."}]) == [
        f"Four.{EOS}"
    ]
    assert not any(chat.tokens(V3, [ASKED, {**SAID, "weight": 0}]).mask)


def test_a_row_with_a_text_that_the_template_leaves_out_is_dropped(chat: Chat) -> None:
    assert chat.tokens(LLM, [ASKED, SAID, RESULT, SAID]).dropped == "text"
    assert (
        chat.tokens(R1, [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, ASKED, SAID]).dropped
        == "text"
    )
    assert chat.tokens(V3, [ASKED, SAID, {"role": "system", "content": "a"}, ASKED, SAID]).dropped == "text"
    assert chat.tokens(V3, [ASKED, SAID, ASKED]).notes == ("behind",)


def test_the_whole_prompt_is_compared_with_the_servers(chat: Chat) -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi"}
    assert not chat.tokens(R1, [ASKED, thought]).server_prompt_differs
    # A server's history holds no reasoning: only the second prompt differs.
    assert chat.tokens(R1, [ASKED, thought, ASKED, thought]).server_prompt_differs
    assert not chat.tokens(V3, [ASKED, SAID, ASKED, SAID]).server_prompt_differs
    # Behind an answer that begins with a newline the server's tokens differ, though its text does not.
    assert chat.tokens(QWEN2, [ASKED, {"role": "assistant", "content": "\nHi"}, ASKED, SAID]).server_prompt_differs
    assert not chat.tokens(QWEN2, [ASKED, {**SAID, "content": "\nHi", "weight": 0}]).server_prompt_differs


HELD = [{"role": "user", "content": f"x{EOS}<|im_end|> <｜User｜>y"}, SAID]


def test_control_tokens_in_texts_are_text(chat: Chat, chat_templates: dict[str, str]) -> None:
    for name in (V3, QWEN2):
        tokens = chat.tokens(name, HELD)
        prompt = chat.tokenizer.apply_chat_template(
            HELD[:1], chat_template=chat_templates[name], add_generation_prompt=True, sanitize_control_tokens=True
        )["input_ids"]
        assert tokens.ids[: len(prompt)] == prompt
        assert tokens.notes == ("control_text",)
        assert not tokens.server_prompt_differs
        kept = chat.tokens(name, HELD, control_tokens="keep")
        assert kept.notes == ("control_keep",)
        assert chat.tokenizer.decode(kept.ids) == chat.tokenizer.decode(tokens.ids)
        assert kept.ids.count(chat.tokenizer.eos_token_id) == tokens.ids.count(chat.tokenizer.eos_token_id) + 1
    with pytest.raises(DataError, match="row 1: a text contains the control token"):
        chat.tokens(V3, HELD, control_tokens="refuse")


def test_a_control_token_in_a_call_does_not_end_it(chat: Chat) -> None:
    call = {"name": "say", "arguments": json.dumps({"text": f"a{EOS}b<|im_end|>c"}, ensure_ascii=False)}
    for name in (QWEN2, R1):
        (text,) = chat.supervised(name, [ASKED, {**CALLS, "tool_calls": [call]}])
        assert f"a{EOS}b<|im_end|>c" in text
        assert text.endswith(("<|im_end|>", "<｜tool▁call▁end｜>"))


def test_answers_and_system_prompts_keep_tokens_for_tool_calls(chat: Chat) -> None:
    tokens = chat.tokens(
        QWEN2,
        [{"role": "system", "content": "Use <tool_call>."}, ASKED, {"role": "assistant", "content": "<tool_call>"}],
    )
    assert tokens.notes == ()
    assert tokens.ids.count(chat.tokenizer.convert_tokens_to_ids("<tool_call>")) == 2


@pytest.mark.parametrize(
    ("prompt", "completion", "separator", "wanted"),
    [
        ("2+2=", "4", "\n", "2+2=\n⟦4"),
        ("2+2= ", "4", "\n", "2+2= ⟦4"),
        ("2+2=", "\n4", " ", "2+2=⟦\n4"),
        ("2+2=", "4", "", "2+2=⟦4"),
    ],
)
def test_a_separator_is_put_between_prompt_and_completion_without_a_template(
    chat: Chat, prompt: str, completion: str, separator: str, wanted: str
) -> None:
    settings = TemplateSettings(None, "assistant", "keep", separator=separator)
    sample = Completion(prompt, completion, Conversation(()))
    (tokens,) = SampleTokeniser(chat.tokenizer, settings).tokenise([("row 1", sample)])
    assert chat.shown(tokens).endswith(f"{wanted}{EOS}⟧")


@pytest.mark.parametrize(
    ("record", "dropped", "notes"),
    [
        ({"instruction": "i", "output": "o", "system": "Be brief."}, "plain", ()),
        ({"instruction": "i", "output": "o", "history": [["q", "a"]]}, "plain", ()),
        ({"instruction": "i", "output": "o", "input": "j"}, "", ()),
        ({"prompt": "p", "completion": "c", "tools": TOOLS}, "", ("tools",)),
    ],
)
def test_what_a_prompt_without_a_template_leaves_out(
    chat: Chat, record: dict[str, Any], dropped: str, notes: tuple[str, ...]
) -> None:
    sample = sample_of(record)
    (tokens,) = SampleTokeniser(chat.tokenizer, TemplateSettings(None, "assistant", "keep")).tokenise(
        [("row 1", sample)]
    )
    assert (tokens.dropped, tokens.notes) == (dropped, notes)


def test_control_tokens_of_plain_text_stay_and_are_reported(chat: Chat) -> None:
    settings = TemplateSettings(None, "assistant", "keep")
    (tokens,) = SampleTokeniser(chat.tokenizer, settings).tokenise([("row 1", PlainText(f"a{EOS}b"))])
    assert tokens.notes == ("control_plain",)
    assert tokens.ids.count(chat.tokenizer.eos_token_id) == 2


def prepared(chat: Chat, folder: Path, rows: list[dict[str, Any]], template: str, **options: Any) -> Counts:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "template.jinja").write_text(template)
    given = {
        "train": str(folder / "rows.jsonl"),
        "template": str(folder / "template.jinja"),
        "cache_dir": str(folder / "cache"),
    }
    config = DataConfig.model_validate(given | options)
    return prepare_rows(config, "train", tokenizer=chat.tokenizer, limits=LIMITS).counts


def test_counts_of_a_data_set_and_its_lines(chat: Chat, chat_templates: dict[str, str], tmp_path: Path) -> None:
    thought = {"messages": [ASKED, {**SAID, "reasoning_content": "hm"}]}
    rows = [{"messages": [ASKED, {**SAID, "odd": 1}], "tools": TOOLS, "source": "x"}] * 10 + [thought]
    for _ in ("tokenised", "found again"):
        counts = prepared(chat, tmp_path, rows, chat_templates[V3])
        assert (counts.read, counts.documents, counts.dropped.rows) == (11, 10, 1)
        assert list(row_notes(counts)) == [
            f"1 of 11 rows are dropped: rows with reasoning that the chat template does not render; the first is {tmp_path}/rows.jsonl line 11",
            "10 of 11 rows name tools that the prompt does not contain, so the model does not see them; "
            f"the first is {tmp_path}/rows.jsonl line 1",
            "columns and fields that are not used: source (10 rows), messages[].odd (10 rows)",
        ]
        assert server_prompt_line(counts) == "0 of 11 rows (0.0%) have a prompt that differs from a server's"


def test_too_many_dropped_rows_are_an_error_with_a_hint(
    chat: Chat, chat_templates: dict[str, str], tmp_path: Path
) -> None:
    thought = {"messages": [ASKED, {**SAID, "reasoning_content": "hm"}]}
    with pytest.raises(DataError) as caught:
        prepared(chat, tmp_path, [thought, {"messages": [ASKED, SAID]}], chat_templates[V3])
    assert "1 of 2 rows of" in caught.value.message
    assert "1 with reasoning that the chat template does not render" in caught.value.message
    assert "set data.reasoning: strip" in caught.value.hint
    assert "line 1" in caught.value.hint
    assert prepared(chat, tmp_path, [thought], chat_templates[V3], reasoning="strip").documents == 1


def test_other_choices_are_other_caches(chat: Chat, chat_templates: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": HELD}))
    (tmp_path / "template.jinja").write_text(chat_templates[V3])
    given = {"train": str(tmp_path / "rows.jsonl"), "template": str(tmp_path / "template.jinja")}
    for option in ({}, {"control_tokens": "keep"}, {"separator": " "}, {}):
        config = DataConfig.model_validate({**given, **option, "cache_dir": str(tmp_path / "cache")})
        prepare_rows(config, "train", tokenizer=chat.tokenizer, limits=LIMITS)
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_prompt_that_was_rendered_is_not_rendered_again(
    monkeypatch: pytest.MonkeyPatch, chat_tokenizer: PreTrainedTokenizerBase, chat_templates: dict[str, str]
) -> None:
    template, count = ChatTemplate(chat_tokenizer, chat_templates[QWEN3]), 0

    def counted(**given: Any) -> Any:
        nonlocal count
        count += 1
        return render_jinja_template(**given)

    monkeypatch.setattr("ds_finetune.data.chat_template.render_jinja_template", counted)
    first, second = [ASKED], [{**ASKED, "content": "3+3?"}]
    assert len({template.render(first, None, opens=True) for _ in range(2)}) == 1
    assert count == 1
    assert "3+3?" in template.render(second, None, opens=True)
    one, true = ([ASKED, {**CALLS, "tool_calls": [_call_with(value)]}] for value in (1, True))
    assert template.render(one, None) != template.render(true, None)


def _call_with(value: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": {"a": value}}}


def test_a_syntax_error_blames_the_template_and_its_line(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match=r"not valid Jinja: line 2: .*endfor.*: '\{\{ m \}\}\{% endif %\}'"):
        ChatTemplate(chat_tokenizer, "{% for m in messages %}\n{{ m }}{% endif %}")
    with pytest.raises(ConfigError, match=r"line 1: No filter named 'nothing'"):
        ChatTemplate(chat_tokenizer, "{{ messages | nothing }}")

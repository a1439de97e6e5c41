"""Dialogues, reasoning and tool calls in the formats of V3.1, Qwen3, GLM-4.5, Kimi K2, gpt-oss and Phi-3: exact tokens.

Each format is written by a short template here, and by the published one where `shared_data` or the folder that the
environment variable PUBLISHED_TEMPLATES names has it.
"""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.data.documents import LengthLimit
from ds_finetune.data.messages import read_conversation
from ds_finetune.data.sample_tokens import SampleTokeniser, TemplateSettings, Tokens
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.data.units import Tokenisation, tokenise_records

SPECIAL = [
    *(f"<|{name}|>" for name in ("im_start", "im_end", "end", "user", "assistant", "observation", "start", "message")),
    *(f"<|{name}|>" for name in ("channel", "return", "call", "im_user", "im_assistant", "im_system", "im_middle")),
    *(f"<|tool_calls_section_{side}|>" for side in ("begin", "end")),
    *(f"<|tool_call_{part}|>" for part in ("begin", "argument_begin", "end")),
]
EOS = "<｜end▁of▁sentence｜>"
ASKED, AGAIN = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "Sure?"}
SAID, YES = {"role": "assistant", "content": "4."}, {"role": "assistant", "content": "Yes."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "functions.add:0", "function": {"name": "add", "arguments": '{"a": 2, "b": "é"}'}}],
}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "functions.add:0"}
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}

V31_CALL = (
    "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c.function.name "
    "+ '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}"
)
GLM_CALL = (
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}"
    "{% for key, value in c.function.arguments.items() %}{{ '\n<arg_key>' ~ key ~ '</arg_key>\n<arg_value>' ~ value }}"
    "</arg_value>{% endfor %}{{ '\n</tool_call>' }}{% endfor %}"
)
K2_CALL = (
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    "{% endif %}"
)
TEMPLATES = {
    "deepseek-ai-DeepSeek-V3.1": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'tool' %}"
        "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% else %}"
        "{% if messages[loop.index0 - 1].role == 'user' %}{{ '<｜Assistant｜></think>' }}{% endif %}{{ m.content or '' }}"
        f"{V31_CALL}{{{{ eos_token }}}}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<｜Assistant｜></think>' }}{% endif %}"
    ),
    "glm_4_5": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}{% elif m.role == 'tool' %}"
        "{{ '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% else %}"
        "{{ '<|assistant|>\n<think></think>' }}{{ '\n' + m.content if m.content else '' }}"
        f"{GLM_CALL}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
    ),
    "moonshotai-Kimi-K2-Thinking": (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}{% elif m.role == 'tool' %}"
        "<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}{% else %}"
        f"<|im_assistant|>assistant<|im_middle|><think></think>{{{{ m.content or '' }}}}{K2_CALL}{{% endif %}}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
    ),
    "openai-gpt-oss-120b": (
        "{% set called = namespace(name='') %}{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>"
        "{{ m.content }}<|end|>{% elif m.role == 'tool' %}<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary"
        "<|message|>{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}{% set call = m.tool_calls[0].function %}"
        "{% set called.name = call.name %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
        "{{ call.arguments | tojson }}<|call|>{% elif loop.last and not add_generation_prompt %}{% if 'thinking' in m %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    ),
}

QUESTION = "<|start|>user<|message|>2+2?<|end|><|start|>assistant"
SECOND = QUESTION + "<|channel|>final<|message|>4.<|end|><|start|>user<|message|>Sure?<|end|><|start|>assistant"
TURNS: dict[str, list[str]] = {
    "deepseek-ai-DeepSeek-V3.1": [f"<｜User｜>2+2?<｜Assistant｜></think>[4.{EOS}]<｜User｜>Sure?<｜Assistant｜></think>[Yes.{EOS}]"],
    "qwen3": [
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\n4.<|im_end|>]\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nYes.<|im_end|>]\n"
    ],
    "glm_4_5": ["<|user|>\n2+2?<|assistant|>[\n<think></think>\n4.<|user|>]\nSure?<|assistant|>[\n<think></think>\nYes.<|user|>]"],
    "moonshotai-Kimi-K2-Thinking": [
        "<|im_user|>user<|im_middle|>2+2?<|im_end|><|im_assistant|>assistant<|im_middle|>[<think></think>4.<|im_end|>]"
        "<|im_user|>user<|im_middle|>Sure?<|im_end|><|im_assistant|>assistant<|im_middle|>[<think></think>Yes.<|im_end|>]"
    ],
    "openai-gpt-oss-120b": [
        QUESTION + "[<|channel|>final<|message|>4.<|return|>]", SECOND + "[<|channel|>final<|message|>Yes.<|return|>]"
    ],
    "phi3": [f"<|user|>\n2+2?<|end|>\n<|assistant|>\n[4.<|end|>]\n<|user|>\nSure?<|end|>\n<|assistant|>\n[Yes.<|end|>]\n{EOS}"],
}  # fmt: skip
"""The documents of two turns, from the first user's turn on, with what is supervised in brackets."""
CALLS: dict[str, str] = {
    "deepseek-ai-DeepSeek-V3.1": (
        "<｜User｜>2+2?<｜Assistant｜></think>[<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        f'{{"a": 2, "b": "é"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{EOS}]<｜tool▁output▁begin｜>4<｜tool▁output▁end｜>[4.{EOS}]'
    ),
    "qwen3": (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 2, "b": "é"}}\n</tool_call><|im_end|>]\n<|im_start|>user\n<tool_response>\n4\n'
        "</tool_response><|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\n4.<|im_end|>]\n"
    ),
    "glm_4_5": (
        "<|user|>\n2+2?<|assistant|>[\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>é</arg_value>\n</tool_call><|observation|>]\n<tool_response>\n4\n</tool_response>"
        "<|assistant|>[\n<think></think>\n4.<|user|>]"
    ),
    "moonshotai-Kimi-K2-Thinking": (
        "<|im_user|>user<|im_middle|>2+2?<|im_end|><|im_assistant|>assistant<|im_middle|>[<think></think>"
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 2, "b": "é"}'
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>]<|im_system|>tool<|im_middle|>## Return of functions.add:0\n4"
        "<|im_end|><|im_assistant|>assistant<|im_middle|>[<think></think>4.<|im_end|>]"
    ),
    "openai-gpt-oss-120b": (
        QUESTION
        + '[ to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": "é"}<|call|>]<|start|>functions.add '
        'to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant[<|channel|>final<|message|>4.<|return|>]'
    ),
}


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> PreTrainedTokenizerBase:
    found = load_tokenizer(str(shared_data / "tokenizers" / "deepseek-r1-distill-qwen"))
    found.add_special_tokens({"additional_special_tokens": SPECIAL})
    return found


@pytest.fixture(params=["own", "published"])
def sources(request: pytest.FixtureRequest, chat_templates: dict[str, str]) -> dict[str, str]:
    """Templates by name, those of this file or the published ones."""
    qwen = {"qwen3": chat_templates["qwen3_tokenizer_config.json"]}
    if request.param == "own":
        return {**TEMPLATES, **qwen}
    folder = Path(os.environ.get("PUBLISHED_TEMPLATES", "/nonexistent"))
    return qwen | {
        name: (folder / f"{name}.jinja").read_text() for name in TEMPLATES if (folder / f"{name}.jinja").exists()
    }


def source_of(name: str, sources: dict[str, str]) -> str:
    if name not in sources:
        pytest.skip(f"PUBLISHED_TEMPLATES has no {name}.jinja")
    return sources[name]


def tokens_of(
    tokenizer: PreTrainedTokenizerBase, source: str, messages: list[Any], tools: object = None, **settings: str
) -> Tokens:
    chosen = TemplateSettings(source, **({"train_on": "assistant", "reasoning": "keep"} | settings))
    sample = read_conversation(messages, tools, "messages", "row 1")
    return SampleTokeniser(tokenizer, chosen).tokenise([("row 1", sample)])[0]


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """The parts of a text, with whether they are in brackets."""
    parts = text.replace("]", "[").split("[")
    yield from ((part, number % 2 == 1) for number, part in enumerate(parts) if part)


def assert_documents(found: Tokens, expected: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """The documents end with these ids and this mask, and nothing before is supervised."""
    assert not found.dropped
    documents = [*found.earlier, found]
    assert len(documents) == len(expected)
    for document, text in zip(documents, expected, strict=True):
        encoded = [(tokenizer(part, add_special_tokens=False)["input_ids"], inside) for part, inside in pieces(text)]
        ids = list(chain.from_iterable(part for part, _ in encoded))
        mask = [inside for part, inside in encoded for _ in part]
        assert document.ids[-len(ids) :] == ids, tokenizer.decode(document.ids)
        assert document.mask == [False] * (len(document.ids) - len(ids)) + mask


@pytest.mark.parametrize("name", TURNS)
def test_two_turns(name: str, sources: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    found = tokens_of(tokenizer, source_of(name, sources), [ASKED, SAID, AGAIN, YES])
    assert_documents(found, TURNS[name], tokenizer)
    assert found.server_prompt_differs == (name == "qwen3")
    assert ("rewritten" in found.notes) == (len(TURNS[name]) > 1)


@pytest.mark.parametrize("name", CALLS)
def test_a_tool_call_with_its_result(name: str, sources: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    found = tokens_of(tokenizer, source_of(name, sources), [ASKED, CALL, RESULT, SAID], [TOOL])
    assert_documents(found, [CALLS[name]], tokenizer)


LLAMA_31 = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "<|start|>assistant<|message|>{{ call.name }}({{ call.arguments | tojson }})<|end|>"
    "{% elif m.role == 'tool' %}<|start|>ipython<|message|>"
    "{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    "<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)


@pytest.mark.parametrize("escape", ["tojson", "tojson(indent=2)", "tojson(ensure_ascii=true)", "escape"])
@pytest.mark.parametrize("result", ['{"sum": "4"}', "four\nor 4\t", 'C:\\new "é" <b>&', "</s> '4'"])
def test_results_that_a_template_escapes_are_rendered(
    escape: str, result: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages: list[Any] = [ASKED, CALL, {**RESULT, "content": result}, SAID]
    for source in (TEMPLATES["openai-gpt-oss-120b"], LLAMA_31):
        source = source.replace("m.content | tojson", f"m.content | {escape}")
        found = tokens_of(tokenizer, source, messages)
        parsed = [ASKED, {**CALL, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}]}]
        served = tokenizer.apply_chat_template(
            [*parsed, messages[2]], chat_template=source, add_generation_prompt=True, return_dict=False
        )
        assert found.dropped == ""
        assert found.ids[: len(served)] == served


def test_only_wanted_answers_of_a_template_that_rewrites_turns_become_documents(
    sources: dict[str, str], tokenizer: PreTrainedTokenizerBase
) -> None:
    source = source_of("openai-gpt-oss-120b", sources)
    first, second = TURNS["openai-gpt-oss-120b"]
    dialogue = [ASKED, SAID, AGAIN, YES]
    assert_documents(tokens_of(tokenizer, source, dialogue, train_on="last_assistant"), [second], tokenizer)
    untrained = [ASKED, {**SAID, "weight": 0}, AGAIN, YES]
    assert_documents(tokens_of(tokenizer, source, untrained), [second], tokenizer)
    assert_documents(tokens_of(tokenizer, source, [ASKED, SAID, AGAIN, {**YES, "weight": 0}]), [first], tokenizer)
    whole = tokens_of(tokenizer, source, dialogue, train_on="all")
    assert (all(whole.mask), whole.earlier) == (True, ())
    how = Tokenisation(
        tokenizer, TemplateSettings(source, "assistant", "keep"), "auto", {}, LengthLimit(4096, "truncate")
    )
    documents, counts = tokenise_records([("row 1", {"messages": dialogue})], how)
    assert (counts.read, counts.documents, len(documents.targets)) == (1, 2, 2)


def test_reasoning_of_gpt_oss_is_trained_in_its_own_turn_only(
    sources: dict[str, str], tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [ASKED, {**SAID, "reasoning_content": "Hm."}, AGAIN, {**YES, "reasoning_content": "So."}]
    thought = "[<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>]"
    found = tokens_of(tokenizer, source_of("openai-gpt-oss-120b", sources), messages)
    assert_documents(found, [QUESTION + thought.format("Hm.", "4."), SECOND + thought.format("So.", "Yes.")], tokenizer)
    assert not found.server_prompt_differs


def test_a_call_whose_id_does_not_name_the_function_is_dropped_with_kimi_k2(
    sources: dict[str, str], tokenizer: PreTrainedTokenizerBase
) -> None:
    call = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "call_7"}]}  # type: ignore[index]
    source = source_of("moonshotai-Kimi-K2-Thinking", sources)
    assert tokens_of(tokenizer, source, [ASKED, call, RESULT, SAID], [TOOL]).dropped == "calls"

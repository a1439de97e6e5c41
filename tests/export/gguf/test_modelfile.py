"""The template of a Modelfile writes what the chat template writes."""

import pytest

from ds_finetune.export.gguf.modelfile import modelfile
from tests.answers_task import CHATML
from tests.export.gguf.modelfiles import render_go
from tests.export.gguf.models import tokenizer

SYSTEM, USER, ANSWER = ({"role": role, "content": f"{role} {{{{ x }}}}"} for role in ("system", "user", "assistant"))
DIALOGUES = ([USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER, ANSWER, USER])
DEFAULT = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}[be \"kind\"]{% endif %}{% for m in messages %}"
    "{{ '<' + m.role + '>' + m.content + ('</s>' if m.role == 'assistant' else '\n') }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, DEFAULT, {"default": CHATML, "tool_use": DEFAULT}])
@pytest.mark.parametrize("has_bos", [False, True])
def test_it_writes_what_transformers_writes(template: object, has_bos: bool) -> None:
    made = tokenizer()
    made.chat_template, made.add_bos_token = template, has_bos
    lines, notes = modelfile("m.gguf", made, [1])
    assert notes == []
    go = lines.splitlines()[1].removeprefix('TEMPLATE """').removesuffix('"""')
    for dialogue in DIALOGUES:
        text = made.apply_chat_template(dialogue, add_generation_prompt=True, tokenize=False)
        # Ollama's tokenizer adds BOS where the GGUF says so.
        assert render_go(go, dialogue) == (text.removeprefix("<s>") if has_bos else text)


def test_a_template_that_looks_at_other_messages_has_none() -> None:
    """R1's drops the reasoning of past turns, and this one numbers turns."""
    made = tokenizer()
    made.chat_template = "{% for m in messages %}{{ loop.index ~ m.role + m.content }}{% endfor %}"
    lines, notes = modelfile("m.gguf", made, [1])
    assert "TEMPLATE" not in lines
    assert "the Modelfile has no TEMPLATE" in notes[0]


def test_ends_beyond_three_are_said() -> None:
    made = tokenizer()
    lines, notes = modelfile("m.gguf", made, [7, 1, 8, 9])
    texts = made.convert_ids_to_tokens([7, 1, 8, 9])
    assert [line for line in lines.splitlines() if line.startswith("PARAMETER")] == [
        f'PARAMETER stop "{text}"' for text in texts if text != '"'
    ]
    assert texts[3] in notes[-1]

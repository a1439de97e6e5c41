"""Writes the Modelfile of a GGUF folder. Ollama renders prompts by its Go template, not by the GGUF's chat template."""

import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ds_finetune.data.chat_template import ChatTemplate, Messages, RenderingError, placeholder

_USER, _ANSWER, _SYSTEM = ({"role": role, "content": placeholder("text")} for role in ("user", "assistant", "system"))
_IS = '{{ %s eq %s "%s" }}'


def modelfile(name: str, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> tuple[str, list[str]]:
    """Write the Modelfile of the GGUF file `name`, with the end tokens `ends`; also returns notes for the user."""
    lines, notes = [f"FROM ./{name}"], list[str]()
    if tokenizer.chat_template:
        template = _go_template(tokenizer)
        if template:
            lines.append(f'TEMPLATE """{template}"""')
        else:
            notes.append(
                "the Modelfile has no TEMPLATE, since the chat template does more than write a text before and after "
                "each message: Ollama uses a template of its own or the bare prompt, llama-server the chat template"
            )
    texts = tokenizer.convert_ids_to_tokens(list(ends))
    lines += [f'PARAMETER stop "{text}"' for text in texts if '"' not in text]
    others = [number for number in ends if number != tokenizer.eos_token_id][2:]
    if others:
        notes.append(
            "a GGUF can name only three tokens that end answers: also pass these to llama.cpp as stop strings: "
            f"{tokenizer.convert_ids_to_tokens(others)}"
        )
    return "".join(f"{line}\n" for line in lines), notes


def _go_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Translate the chat template to Go, without tools; empty if a message's text depends on other messages."""
    given = tokenizer.chat_template
    try:
        template = ChatTemplate(tokenizer, given["default"] if isinstance(given, dict) else given)
        start, to_answer, to_user, opened = _around(template, [_USER, _ANSWER, _USER])
        with_system = _around(template, [_SYSTEM, _USER, _ANSWER, _USER])
        longer = _around(template, [_USER, _ANSWER, _USER, _ANSWER, _USER])
    except (RenderingError, KeyError, ValueError):
        return ""
    rest = [to_answer, to_user, opened]
    if with_system[2:] != rest or longer != [start, to_answer, to_user, *rest]:
        return ""
    before_system, after_system = with_system[:2]
    bos = tokenizer.bos_token
    if bos and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]:
        # Ollama's tokenizer adds BOS itself, so the template must not.
        start, before_system = start.removeprefix(bos), before_system.removeprefix(bos)
    before_user = (
        f"{_IS % ('if', '$last', '')}{_literal(start)}{_IS % ('else if', '$last', 'system')}{_literal(after_system)}"
        f"{{{{ else }}}}{_literal(to_user)}{{{{ end }}}}"
    )
    parts = {"system": _literal(before_system), "user": before_user, "assistant": _literal(to_answer)}
    of_roles = "".join(
        f"{_IS % ('if', '.Role', role)}{before}{{{{ .Content }}}}{{{{ end }}}}" for role, before in parts.items()
    )
    last, after = '{{ $last := "" }}{{ range .Messages }}', "{{ $last = .Role }}{{ end }}"
    return f"{last}{of_roles}{after}{_literal(opened)}"


def _around(template: ChatTemplate, messages: Messages) -> list[str]:
    """Render `messages`. Returns the texts that the chat template writes before, between and after the messages."""
    parts = template.render(messages, None, opens=True).split(placeholder("text"))
    if len(parts) != len(messages) + 1:
        raise RenderingError
    return parts


def _literal(text: str) -> str:
    """Make a Go template action that prints `text`, so that no part of the text is read as an action."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""

"""Templates of Modelfiles rendered as Go renders them, by Jinja."""

import re
from collections.abc import Mapping, Sequence

from jinja2 import Environment

_TESTS = {".Role": "message.role", "$last": "ns.last"}


def render_go(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The text that a template makes of messages: literals, one variable, `if eq`, `else if eq`, `else` and `range`."""
    opened: list[str] = []

    def translated(action: re.Match[str]) -> str:
        words = action[1].split(" ", 3)
        if action[1] == "range .Messages":
            opened.append("for")
            return "{% for message in messages %}"
        if words[:2] == ["if", "eq"]:
            opened.append("if")
            return f"{{% if {_TESTS[words[2]]} == {words[3]} %}}"
        if words[:2] == ["else", "if"]:
            variable, value = words[3].split(" ")
            return f"{{% elif {_TESTS[variable]} == {value} %}}"
        if action[1] in ("else", "end"):
            return "{% else %}" if action[1] == "else" else f"{{% end{opened.pop()} %}}"
        known = {
            '$last := ""': '{% set ns.last = "" %}',
            "$last = .Role": "{% set ns.last = message.role %}",
            ".Content": "{{ message.content }}",
        }
        assert action[1] in known or action[1].startswith('"'), action[1]
        return known.get(action[1], f"{{{{ {action[1]} }}}}")

    text = re.sub(r'\{\{ ("(?:[^"\\]|\\.)*"|.+?) \}\}', translated, template)
    environment = Environment(autoescape=False, keep_trailing_newline=True)
    return environment.from_string("{% set ns = namespace(last='') %}" + text).render(messages=messages)

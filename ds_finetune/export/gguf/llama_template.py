"""Features of chat templates that llama.cpp's template engine lacks: its server does not start with such a template."""

import re
from collections.abc import Iterator, Mapping

from jinja2 import Environment, TemplateSyntaxError, nodes
from transformers import PreTrainedTokenizerBase

from ds_finetune.errors import ExportError

_FILTERS = (
    "attr batch center e escape filesizeformat forceescape groupby pprint random round striptags sum truncate "
    "urlencode urlize wordcount wordwrap xmlattr"
)
_TESTS = "escaped filter le"
_FUNCTIONS = "cycler joiner lipsum"
_WORDS: Mapping[type[nodes.Node], str] = {
    **{nodes.Block: "block", nodes.Extends: "extends", nodes.Include: "include", nodes.Import: "import"},
    **{nodes.FromImport: "from", nodes.With: "with", nodes.ScopedEvalContextModifier: "autoescape"},
    **{nodes.Pow: "**", nodes.FloorDiv: "//"},
}
"""Jinja 3.1 features with which the server of xllamacpp 2026.10 does not start."""
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
"""transformers' marks around the model's answers, which llama.cpp ignores."""


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """ExportError where llama.cpp cannot compute a chat template of the tokenizer."""
    given = tokenizer.chat_template or {}
    for name, text in (given if isinstance(given, Mapping) else {"default": given}).items():
        lacking = ", ".join(dict.fromkeys(_lacking(text)))
        if lacking:
            raise ExportError(
                f"the chat template `{name}` has {lacking}, which llama.cpp cannot compute",
                hint="write the template without it",
            )


def _lacking(text: str) -> Iterator[str]:
    plain = _GENERATION.sub(lambda mark: f"{{%{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}%}}", text)
    try:
        tree = Environment(autoescape=True, extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError as error:
        yield f"a mistake in line {error.lineno} ({error.message})"
        return
    yield from (f"the filter `{node.name}`" for node in tree.find_all(nodes.Filter) if node.name in _FILTERS.split())
    yield from (f"the test `{node.name}`" for node in tree.find_all(nodes.Test) if node.name in _TESTS.split())
    yield from (f"`{node.name}`" for node in tree.find_all(nodes.Name) if node.name in _FUNCTIONS.split())
    yield from (f"`{_WORDS[type(node)]}`" for node in tree.find_all(tuple(_WORDS)))

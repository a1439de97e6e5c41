"""Prints texts of the repository at random for a reader who marks what was understood.

`python scripts/draw_texts.py SEED [N]` chooses N (60) docstrings, comments, paragraphs of pages and errors with hints.
Each is shown as an editor or a page shows it: a docstring with the name and signature of what it describes, a comment
with its line of code, a paragraph under its heading; an error alone.
"""

import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def of_syntax(node: ast.AST, owner: str) -> Iterator[str]:
    """Docstrings of `node` (named `owner`) and below it, also of attributes; errors with a hint."""
    if isinstance(node, ast.Call) and node.args:
        hints = (keyword.value for keyword in node.keywords if keyword.arg == "hint")
        texts = (f"{message(node.args[0])}\n  hint: {message(hint)}" for hint in hints)
        # A text that only joins values has no words of its own to understand.
        yield from (text for text in texts if re.search(r"\w{2}", re.sub(r"\{.*?\}|  hint:", "", text)))
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        owner = f"{owner}.{node.name}"
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield from [f"{owner}{signature(node)}\n{text}"] if (text := ast.get_docstring(node)) else []
        for variable, each in pairwise(node.body):
            if isinstance(variable, ast.Assign | ast.AnnAssign) and isinstance(each, ast.Expr):
                value = getattr(each.value, "value", None)
                yield from [f"{owner}: {ast.unparse(variable)}\n{cleandoc(value)}"] if isinstance(value, str) else []
    for child in ast.iter_child_nodes(node):
        yield from of_syntax(child, owner)


def signature(node: ast.AST) -> str:
    """Arguments and result of a function; nothing for a class or module."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    return f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def message(node: ast.expr) -> str:
    """The text of an expression; inserted values are in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(message, node.values))
    value = node.value if isinstance(node, ast.FormattedValue) else node
    return str(node.value) if isinstance(node, ast.Constant) else f"{{{ast.unparse(value)}}}"


def comments(source: str) -> Iterator[str]:
    """Comments of two or more words, consecutive lines as one, and the line of code that each stands at."""
    lines, block = source.splitlines(), ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = lines[min(token.start[0], len(lines)) - 1].strip()
        if token.type == tokenize.COMMENT and not re.match(r"# ?(noqa|type:|!)", token.string):
            block = f"{block}\n{token.string if line.startswith('#') else line}".strip()
        elif token.type != tokenize.NL:
            at_code = block.startswith("#") and token.type not in (tokenize.DEDENT, tokenize.INDENT)
            if len(block.split()) > 2 and (at_code or not block.startswith("#")):
                yield f"{block}\n{line}" if at_code else block
            if at_code or not block.startswith("#"):
                block = ""


def paragraphs(page: str) -> Iterator[str]:
    """Paragraphs and points of lists of a Markdown page, each under its heading; no code and no tables."""
    heading = ""
    for text in re.split(r"\n\s*\n|\n(?=- )|\n(?=#)", re.sub(r"(?ms)^ *```.*?^ *```|^\|.*?$", "", page)):
        if text.lstrip().startswith("#"):
            heading, _, text = text.strip().partition("\n")
        yield from [f"{heading}\n{text.strip()}"] if len(text.split()) > 2 else []


if __name__ == "__main__":
    texts = []
    for path in sorted(ROOT.glob("ds_finetune/**/*.py")):
        source = path.read_text(encoding="utf-8")
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        texts += [*of_syntax(ast.parse(source), module), *comments(source)]
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        texts += paragraphs(path.read_text(encoding="utf-8"))
    for number, text in enumerate(random.Random(sys.argv[1]).sample(texts, int((*sys.argv, 60)[2])), start=1):
        sys.stdout.write(f"{number}. {text}\n\n")

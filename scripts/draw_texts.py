"""Prints texts of the repository at random, each without its neighbours, for a reader who marks what was understood.

`python scripts/draw_texts.py SEED [N]` chooses N (60) docstrings, comments, paragraphs of pages and errors with hints.
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


def of_syntax(tree: ast.Module) -> Iterator[str]:
    """Docstrings, also of attributes, with the name of what they describe; errors with a hint."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            hints = (keyword.value for keyword in node.keywords if keyword.arg == "hint")
            yield from (f"{message(node.args[0])}\n  hint: {message(hint)}" for hint in hints)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from [f"{getattr(node, 'name', 'a module')}: {text}"] if (text := ast.get_docstring(node)) else []
            for owner, each in pairwise(node.body):
                if isinstance(owner, ast.Assign | ast.AnnAssign) and isinstance(each, ast.Expr):
                    name, value = ast.unparse(owner).partition(" =")[0], getattr(each.value, "value", None)
                    yield from [f"{name}: {cleandoc(value)}"] if isinstance(value, str) else []


def message(node: ast.expr) -> str:
    """The text of an expression; inserted values are in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(message, node.values))
    value = node.value if isinstance(node, ast.FormattedValue) else node
    return str(node.value) if isinstance(node, ast.Constant) else f"{{{ast.unparse(value)}}}"


def comments(source: str) -> Iterator[str]:
    """Comments of two or more words; consecutive lines are one comment."""
    block = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# ?(noqa|type:|!)", token.string):
            block = f"{block}\n{token.string}".strip()
        elif token.type != tokenize.NL:
            yield from [block] if len(block.split()) > 2 else []
            block = ""


if __name__ == "__main__":
    sources = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("ds_finetune/**/*.py"))]
    texts = [text for each in sources for text in (*of_syntax(ast.parse(each)), *comments(each))]
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        plain = re.sub(r"(?ms)^ *```.*?^ *```|^\|.*?$|^#.*?$", "", page.read_text(encoding="utf-8"))
        texts += [each.strip() for each in re.split(r"\n\s*\n|\n(?=- )", plain) if len(each.split()) > 2]
    for place, text in enumerate(random.Random(sys.argv[1]).sample(texts, int((*sys.argv, 60)[2])), start=1):
        sys.stdout.write(f"{place}. {text}\n\n")

"""Names and prose: one class for one name, the field's words instead of private ones, lines that fit a screen."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.conftest import ROOT

COLUMNS = 120
PRAGMA = re.compile(r"  # (?:noqa|type:).*$")
PACKAGE = sorted((ROOT / "ds_finetune").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [
    *PACKAGE,
    *PAGES,
    *(
        path
        for folder in ("ds_configs", "scripts", "examples", "hostfiles")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    ),
    *(path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)),
]
WORDS = {
    r"vigils?": "monitor",
    r"everyones\w*": "all_gather_object, all_gather_scalar",
    r"(?:go|goes|going|gone|went)[ _]on (?:from|with)": "resume",
    r"go_on|goes_on|gone_on": "resume",
    r"(?:stand|stands|standing|stood) still|com(?:e|es|ing) to a stand": "hang",
    r"odd one|is odd|who_is_odd": "the rank at fault, the straggler",
    r"minds|minded|minding": "supervise, monitor, handle",
    r"multipl(?:y|ies|ied|ying)[ _]out": "dequantise",
    r"learnt": "supervised",
    r"(?:written|writes|saves?|saved)[ _]aside": "asynchronous",
    r"tak(?:e|es|en|ing) away|took away": "remove",
    r"lets? go of|letting go of": "release",
    r"says? nothing to|said nothing to": "is not valid with",
    r"mend|mends|mended|mending|way[ _]out": "hint, fix",
    r"side_by_side|_?CopyIn|_?SumOut": "copy to, reduce from the tensor parallel region",
    r"(?:un)?proven": "tested (against what)",
}
"""Words that were used once, as a regular expression between word boundaries, and what is written instead."""
FORBIDDEN = re.compile("|".join(rf"\b(?:{word})\b" for word in WORDS), re.IGNORECASE)
NEIGHBOURLY = re.compile(r'"""(?:Those|Of|The same (?:as|for|from|in|of|on|where|with|without))\b.*')
"""Beginnings of docstrings that say nothing without the docstring before them."""


def test_private_words_do_not_return() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word[0]}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for word in FORBIDDEN.finditer(line)
    ]
    assert found == []


def test_docstrings_are_understood_without_their_neighbours() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {fragment[0]}"
        for path in PACKAGE
        for fragment in NEIGHBOURLY.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_lines_fit_120_columns() -> None:
    """But for rows of tables, which Markdown cannot wrap, and pragmas at the end of a line."""
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*PACKAGE, *PAGES]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(PRAGMA.sub("", line)) > COLUMNS and not line.startswith("|")
    ]
    assert wide == []


def test_a_class_name_means_one_thing() -> None:
    homes = defaultdict(list)
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}

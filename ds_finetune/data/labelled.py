"""Rows with a label: answers that are marked as good or bad, and texts with a class or a number."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.data.layouts import LAYOUTS, LayoutColumns, Record, Sample, by_name, read_text
from ds_finetune.data.messages import shown_value
from ds_finetune.errors import DataError

MARKED_LAYOUTS = {
    name: LayoutColumns(name, layout.needed | {"label"}, layout.optional, layout.read)
    for name, layout in LAYOUTS.items()
    if name != "text"
}
"""Layouts of answers that are marked as good or bad: those of dialogue, with a column `label`."""
_PAIRS_OF_TEXTS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence", "sentence2"),
)
"""Names of the columns of a pair of texts in GLUE's tasks; the last is a single text."""


@dataclass(frozen=True)
class MarkedAnswer:
    """A dialogue whose last answer is good or bad."""

    sample: Sample
    is_good: bool


@dataclass(frozen=True)
class LabelledText:
    """A text, or a pair of texts, with the number of its class, or its number on a scale."""

    text: str
    text_pair: str | None
    target: float


def default_columns(record: Record, columns: Mapping[str, str]) -> dict[str, str]:
    """`columns`, and the names that KTO's and GLUE's data sets have for `label`, `text` and `text_pair`."""
    found: dict[str, str] = {}
    if "label" not in record and "kto_tag" in record:
        found["label"] = "kto_tag"
    if "text" not in record:
        first, second = next((pair for pair in _PAIRS_OF_TEXTS if pair[0] in record), ("", ""))
        found |= {key: name for key, name in (("text", first), ("text_pair", second)) if name in record}
    return {**found, **columns}


def read_mark(label: object, column: str, where: str) -> bool:
    """Whether an answer is good; DataError for labels other than true, false, 1 and 0."""
    if isinstance(label, int) and label in (0, 1):
        return bool(label)
    raise DataError(
        f"{where}: column `{column}` is {shown_value(label)}, which marks no answer as good or bad",
        hint="give true or 1 for a good answer, false or 0 for a bad one",
    )


def whole_number(label: object) -> int | None:
    """A class as its number: an integer, a boolean, or an integer's text, as CSV files have it; None for others."""
    if isinstance(label, int):
        return int(label)
    is_number = isinstance(label, str) and label.removeprefix("-").isdecimal() and str(int(label)) == label
    return int(str(label)) if is_number else None


def read_number(label: object, column: str, where: str) -> float:
    """A label of regression; DataError where it is no finite number, or a number's text."""
    try:
        number = math.nan if isinstance(label, bool) or not isinstance(label, int | float | str) else float(label)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{where}: column `{column}` is {shown_value(label)}, not a finite number",
            hint="objective.num_labels 1 is regression; for classes, leave it out or give their number",
        )
    return number


def _texts(view: Mapping[str, Any], where: str) -> tuple[str, str | None]:
    pair = read_text(view, "text_pair", where) if view.get("text_pair") is not None else None
    return read_text(view, "text", where), pair


LABELLED_LAYOUTS = by_name(("labelled", "text label", "text_pair", _texts))
"""The layout of texts with labels."""

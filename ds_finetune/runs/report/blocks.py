"""What a page is made of: sections of blocks, for each kind of which the template has a part, and texts of numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ds_finetune.config.units import GIB, MIB, share_text

TEMPLATES = Path(__file__).parent / "templates"
Row = tuple[str, ...]
NONE = "-"
"""Stands for a number that is not known."""


class Block:
    """A part of a section."""

    @property
    def kind(self) -> str:
        """The name under which the template has a part for it."""
        return type(self).__name__


@dataclass(frozen=True)
class Facts(Block):
    """Names with their texts."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class DataTable(Block):
    """A table with a caption; the columns after the first `text_columns` are numbers, and aligned right."""

    caption: str
    columns: Row
    rows: Sequence[Row]
    text_columns: int = 1
    is_folded: bool = False
    """Whether the reader has to open it."""


@dataclass(frozen=True)
class Chart(Block):
    """A chart, with what `runs/report/charts.py` made for `templates/plots.js` to draw.

    `number` says how numbers are printed: `number`, `percent`, `seconds`, `gib` or `ratio`. `summary` is read by screen
    readers in place of the picture.
    """

    title: str
    plot: Mapping[str, Any]
    summary: str
    number: str = "number"
    is_wide: bool = False
    can_be_logarithmic: bool = False
    height: int = 260
    """In pixels."""
    note: str = ""


@dataclass(frozen=True)
class Charts(Block):
    """Charts beside each other, as many in a row as fit; with a caption, which the reader has to open."""

    charts: Sequence[Chart]
    caption: str = ""


@dataclass(frozen=True)
class MarkedText(Block):
    """A document whose supervised spans are coloured."""

    title: str
    spans: Sequence[tuple[str, bool]]


@dataclass(frozen=True)
class PromptAnswers(Block):
    """A prompt with the expected answer, and what the model answered at each step."""

    title: str
    prompt: str
    expected: str
    answers: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Remark(Block):
    """A sentence or two; `tone` is `plain`, `good` or `bad`."""

    text: str
    tone: str = "plain"


@dataclass(frozen=True)
class Points(Block):
    """Sentences below each other."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Code(Block):
    """Text as it is typed or stored."""

    title: str
    text: str
    is_folded: bool = False


@dataclass(frozen=True)
class ReportSection:
    """A part of the page with a heading, to which the list at its top links by `name`."""

    name: str
    title: str
    blocks: Sequence[Block]
    lead: str = ""
    """A sentence below the heading."""


@dataclass(frozen=True)
class Tile:
    """A number that the top of the page shows large."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    subtitle: str
    state: str
    """A word such as `finished`; empty for several runs."""
    tiles: Sequence[Tile]
    sections: Sequence[ReportSection]
    warnings: Sequence[str] = field(default_factory=tuple)

    @property
    def charts(self) -> list[Chart]:
        """All charts in the order of the page."""
        blocks = [block for section in self.sections for block in section.blocks]
        nested = [list(block.charts) if isinstance(block, Charts) else [block] for block in blocks]
        return [block for group in nested for block in group if isinstance(block, Chart)]


def render_template(template: str, *, is_escaped: bool, **values: object) -> str:
    """The text of a template with values; texts are escaped for HTML where `is_escaped`."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=is_escaped, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(template).render(values)


def number_text(value: float | None, kind: str = "number") -> str:
    """A number of one of the kinds of `Chart.number`, for people."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not finite"
    texts = {
        "percent": share_text(value),
        "seconds": f"{value:.3g} s",
        "gib": f"{value:.2f} GiB",
        "ratio": f"{value:.2f}x",
    }
    return texts.get(kind) or _plain_text(value)


def _plain_text(value: float) -> str:
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    if size < 0.001:
        return f"{value:.3g}"
    return f"{value:.4f}" if size < 100 else f"{value:.1f}"


def size_text(num_bytes: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def duration_text(seconds: float) -> str:
    """A duration in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    days, hours, minutes = whole // 86_400, whole % 86_400 // 3600, whole % 3600 // 60
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"


def time_text(seconds: float) -> str:
    """A moment given in seconds since 1970."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

"""Elements of a page, which are sections of blocks, and texts of numbers and times."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ds_finetune.config.units import share_text
from ds_finetune.console.phase_line import time_text
from ds_finetune.runs.report.charts import Chart

TEMPLATES = Path(__file__).parent / "templates"
Row = tuple[str, ...]
NONE = "-"
"""Text for an unknown number."""


@dataclass(frozen=True)
class Facts:
    """A list of names, each with a text."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class DataTable:
    """A table with a caption; its first `text_columns` columns are texts, and the others right-aligned numbers."""

    caption: str
    columns: Row
    rows: Sequence[Row]
    text_columns: int = 1
    is_folded: bool = False
    """Whether the table is collapsed at first."""


@dataclass(frozen=True)
class Charts:
    """Charts, as many beside each other as fit; charts with a caption are collapsed at first."""

    charts: Sequence[Chart]
    caption: str = ""


@dataclass(frozen=True)
class MarkedText:
    """A document whose supervised spans are coloured."""

    title: str
    spans: Sequence[tuple[str, bool]]


@dataclass(frozen=True)
class PromptAnswers:
    """A prompt, the expected answer, and the model's answer at each step."""

    title: str
    prompt: str
    expected: str
    answers: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Remark:
    """A sentence or two; `tone` is `plain`, `good` or `bad`."""

    text: str
    tone: str = "plain"


@dataclass(frozen=True)
class Code:
    """Text shown as code; with `is_tail`, its end is shown first."""

    title: str
    text: str
    is_folded: bool = False
    is_tail: bool = False


@dataclass(frozen=True)
class RunTable:
    """A table of runs with links to their pages, in which runs can be ticked for a comparison."""

    rows: Sequence[Mapping[str, Any]]


Block = Facts | DataTable | Charts | MarkedText | PromptAnswers | Remark | Code | RunTable
"""A part of a section. The page template has a macro for each kind of block except charts."""


@dataclass(frozen=True)
class ReportSection:
    """A part of the page with a heading; the list at the top links to it by `name`."""

    name: str
    title: str
    blocks: Sequence[Block]
    lead: str = ""
    """A sentence below the section's heading."""


@dataclass(frozen=True)
class Tile:
    """A number shown large at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The content of a report page."""

    title: str
    subtitle: str
    state: str
    """State of the run, such as `finished`; empty for several runs."""
    tiles: Sequence[Tile]
    sections: Sequence[ReportSection]
    warnings: Sequence[str] = field(default_factory=tuple)

    @property
    def tone(self) -> str:
        """Colour class of the state."""
        return state_tone(self.state)

    @property
    def charts(self) -> list[Chart]:
        """All charts, in the order of the page."""
        blocks = [block for section in self.sections for block in section.blocks if isinstance(block, Charts)]
        return [chart for block in blocks for chart in block.charts]


def render_template(template: str, *, is_escaped: bool, **values: object) -> str:
    """The text of a template with `values`; with `is_escaped`, texts are escaped for HTML."""
    return _environment(is_escaped).get_template(template).render(values)


@cache
def _environment(is_escaped: bool) -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=is_escaped, undefined=StrictUndefined, trim_blocks=True
    )


def number_text(value: float | None, kind: str = "number") -> str:
    """A number in one of the formats of `Chart.number`."""
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


def state_tone(state: str) -> str:
    """Colour class of a run's state: `good`, `bad` or `plain`."""
    return {"finished": "good", "failed": "bad", "hung": "bad"}.get(state, "plain")


def ago_text(moment: float) -> str:
    """Time since `moment`, in seconds since 1970, as text."""
    return f"{time_text(max(time.time() - moment, 0.0))} ago" if moment else NONE

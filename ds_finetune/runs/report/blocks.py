"""What a section of a report is made of. The template has a part for each kind; a section is a title and its blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

Row = tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Names with their texts."""

    rows: Sequence[tuple[str, str]]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class DataTable:
    """A table with a caption; the columns after the first `text_columns` are numbers, and aligned right."""

    caption: str
    columns: Row
    rows: Sequence[Row]
    text_columns: int = 1
    is_folded: bool = False
    """Whether the reader has to open it."""
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Chart:
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
    kind: ClassVar[str] = "chart"


@dataclass(frozen=True)
class Charts:
    """Charts beside each other, as many in a row as fit; with a caption, which the reader has to open."""

    charts: Sequence[Chart]
    caption: str = ""
    kind: ClassVar[str] = "charts"


@dataclass(frozen=True)
class MarkedText:
    """A document whose supervised spans are coloured."""

    title: str
    spans: Sequence[tuple[str, bool]]
    kind: ClassVar[str] = "marked"


@dataclass(frozen=True)
class PromptAnswers:
    """A prompt with the expected answer, and what the model answered at each step."""

    title: str
    prompt: str
    expected: str
    answers: Sequence[tuple[str, str]]
    kind: ClassVar[str] = "answers"


@dataclass(frozen=True)
class Remark:
    """A sentence or two; `tone` is `plain`, `good` or `bad`."""

    text: str
    tone: str = "plain"
    kind: ClassVar[str] = "message"


@dataclass(frozen=True)
class Points:
    """Sentences below each other."""

    texts: Sequence[str]
    kind: ClassVar[str] = "points"


@dataclass(frozen=True)
class Code:
    """Text as it is typed or stored."""

    title: str
    text: str
    is_folded: bool = False
    kind: ClassVar[str] = "code"


Block = Facts | DataTable | Chart | Charts | MarkedText | PromptAnswers | Remark | Points | Code


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

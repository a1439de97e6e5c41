"""Pages of reports: sections of tables, texts and charts, rendered as one HTML file that needs no network."""

import base64
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ds_finetune import __version__
from ds_finetune.config.units import share_text
from ds_finetune.console.phase_line import time_text
from ds_finetune.runs.report.charts import Chart, is_percentage
from ds_finetune.system.versions import require_extra

TEMPLATES = Path(__file__).parent / "templates"
NONE = "-"
"""Text that a page of a report shows in place of an unknown number."""
Row = Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table of a page. Its first `text_columns` columns hold texts; the others hold numbers, which are right-aligned.

    If `columns` is empty, the table has no head, and each row is a name with a text.
    """

    caption: str
    columns: Row
    rows: Sequence[Row]
    text_columns: int = 1


@dataclass(frozen=True)
class Charts:
    """A block of charts on a page. The page shows as many charts beside each other as fit."""

    charts: Sequence[Chart]


@dataclass(frozen=True)
class Text:
    """A text on a page, in spans that may be marked by a colour. A folded text is shown when a reader opens it. If
    `is_tail`, the text is the end of a file, and its box is scrolled to the end.
    """

    title: str
    spans: Sequence[tuple[str, bool]]
    is_folded: bool = False
    is_tail: bool = False


@dataclass(frozen=True)
class Remark:
    """A remark of a sentence or two on a page. Its `tone` is `plain`, `good` or `bad`."""

    text: str
    tone: str = "plain"


Block = Table | Charts | Text | Remark


@dataclass(frozen=True)
class PageSection:
    """A part of a page with a heading; the list at the top of the page links to it by `name`."""

    name: str
    title: str
    blocks: Sequence[Block]
    lead: str = ""
    """A sentence that is shown below the heading of the section."""


@dataclass(frozen=True)
class Tile:
    """A number that is shown large at the top of a page, with a label and a note."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The content of a page. `state` is the state of the page's run, such as `finished`; it is empty if the page shows
    several runs.
    """

    title: str
    subtitle: str
    state: str
    tiles: Sequence[Tile]
    sections: Sequence[PageSection]
    warnings: Sequence[str] = field(default_factory=tuple)

    @property
    def charts(self) -> list[Chart]:
        """All charts of the page, in the order in which it shows them."""
        blocks = [block for section in self.sections for block in section.blocks if isinstance(block, Charts)]
        return [chart for block in blocks for chart in block.charts]


def render_page(page: Page, *, is_live: bool = False, has_library: bool = True) -> str:
    """Render a page as HTML with styles, scripts and the chart library inside.

    The page's content security policy forbids all requests, and all scripts but its own. A live page, which `watch`
    serves, may ask its server for new points; the server answers with the page without the library.

    DependencyError if the page has charts and the extra `pages` is not installed.
    """
    charts = [chart.tree() for chart in page.charts]
    library = [bokehjs()] if charts and has_library else []
    scripts = [*library, (TEMPLATES / "page.js").read_text(encoding="utf-8")]
    return render_template(
        "page.html.j2",
        is_escaped=True,
        page=page,
        version=__version__,
        is_live=is_live,
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
        # `<` is escaped, because the HTML parser looks for `</script` and `<!--` in JSON too.
        data=json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def bokehjs() -> str:
    """The scripts of the chart library BokehJS with its plotting functions. DependencyError without bokeh."""
    require_extra("pages", "a page with charts")
    return _read_bokehjs()


@cache
def _read_bokehjs() -> str:
    bokeh = find_spec("bokeh")
    assert bokeh is not None
    folder = Path(str(bokeh.origin)).parent / "server" / "static" / "js"
    return "\n".join((folder / f"{name}.min.js").read_text(encoding="utf-8") for name in ("bokeh", "bokeh-api"))


def render_template(template: str, *, is_escaped: bool, **values: object) -> str:
    """Fill a template of this folder with `values`, escaped for HTML if `is_escaped`; returns the text."""
    return _environment(is_escaped).get_template(template).render(values)


@cache
def _environment(is_escaped: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=is_escaped, undefined=StrictUndefined, trim_blocks=True
    )
    environment.globals["tone_of"] = {"finished": "good", "failed": "bad", "hung": "bad"}.get
    return environment


def number_text(value: float | None, metric: str = "") -> str:
    """Format a number in the unit that the name of its metric implies."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not finite"
    if is_percentage(metric):
        return share_text(value)
    if unit := {"seconds": " s", "gib": " GiB"}.get(metric.rpartition("_")[2]):
        return f"{value:.3g}{unit}"
    size = abs(value)
    is_integer = size >= 1000 or value == int(value)
    return f"{value:{',.0f' if is_integer else '.3g' if size < 0.001 else '.4f' if size < 100 else '.1f'}}"


def ago_text(moment: float) -> str:
    """Format the time since `moment`, which is in seconds since 1970, such as `5 min ago`."""
    return f"{time_text(max(time.time() - moment, 0.0))} ago" if moment else NONE

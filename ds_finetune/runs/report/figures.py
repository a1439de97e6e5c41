"""Draws charts as bokeh figures.

Figures have no colours for text, grid and background, because the page sets those of its theme. Figures of lines have
no values: the page fills the source `line N` of the renderer `N` with line N and its new steps.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import bokeh
import numpy as np
from bokeh.embed import json_item
from bokeh.models import (
    BasicTicker,
    BoxSelectTool,
    BoxZoomTool,
    ColorBar,
    ColumnDataSource,
    CrosshairTool,
    DataRange1d,
    FixedTicker,
    HoverTool,
    Label,
    LinearColorMapper,
    NumeralTickFormatter,
    Range1d,
    Span,
)
from bokeh.palettes import interp_palette
from bokeh.plotting import figure

from ds_finetune.errors import DependencyError
from ds_finetune.runs.report.blocks import Chart
from ds_finetune.runs.report.charts import CoordinateAxis, LinePlot, MapPlot, ParallelPlot

_GREY = "#7b8494"
_DIVERGING = ("#2c5fa8", "#7fa8d9", "#d9dce2", "#eda36e", "#c2410c")
_SEQUENTIAL = ("#e8edf5", "#a9c4ea", "#5f93dc", "#2f63b8", "#173a78")
_BEST_TO_WORST = ("#2563eb", "#12a594", "#f2b134", "#d8446a")
_SHADES = 64
_STYLES: dict[str, dict[str, Any]] = {
    "faint": {"line_width": 1, "line_alpha": 0.45, "level": "underlay"},
    "dashed": {"line_width": 1, "line_dash": "dashed"},
}
UNITS = {"percent": "%", "seconds": " s", "gib": " GiB", "ratio": "x"}
"""Suffix of numbers of each format."""


def bokehjs() -> Path:
    """The script of BokehJS, which defines the global `Bokeh`; DependencyError if bokeh was installed without it."""
    script = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
    if not script.is_file():
        reason = f"bokeh {bokeh.__version__} is installed without `{script}`"
        raise DependencyError(reason, hint="pip install --force-reinstall 'ds_finetune[pages]'")
    return script


def chart_items(chart: Chart) -> list[Any]:
    """The chart as JSON for `Bokeh.embed`, and a second time with a logarithmic axis if possible.

    Charts of lines that differ only in names and values share one object.
    """
    plot = chart.plot
    if not isinstance(plot, LinePlot):
        return [json_item(_draw_map(plot) if isinstance(plot, MapPlot) else _draw_parallel(plot))]
    strokes = tuple((line.role, line.hex_colour, line.role == "points" or np.size(line.x) == 1) for line in plot.lines)
    axes = (plot.x_name, plot.has_log_x, chart.number == "percent")
    scales = (False, True)[: 1 + chart.can_be_logarithmic]
    return [_line_item(_LineFigure(strokes, *axes, tuple(plot.markers), is_log)) for is_log in scales]


class _LineFigure(NamedTuple):
    """Key of a figure of lines; each stroke has a role, a colour, and whether its points are marked."""

    strokes: tuple[tuple[str, str, bool], ...]
    x_name: str
    has_log_x: bool
    is_percent: bool
    markers: tuple[tuple[int, str], ...]
    is_log: bool


def _empty(**settings: Any) -> figure:  # noqa: ANN401 - settings of bokeh
    frame = {"toolbar_location": None, "sizing_mode": "stretch_both", "min_border_right": 20}
    fills = {"background_fill_color": None, "border_fill_color": None, "outline_line_color": None}
    made = figure(**{**frame, **fills, **settings})
    made.xgrid.visible = False
    made.axis.minor_tick_line_color = None
    return made


@lru_cache(maxsize=256)
def _line_item(drawn: _LineFigure) -> Any:  # noqa: ANN401 - JSON
    """A figure of lines as JSON, which takes 40 ms to make."""
    made = _empty(
        tools=[CrosshairTool(dimensions="height", line_color=_GREY), BoxZoomTool(dimensions="width")],
        x_axis_type="log" if drawn.has_log_x else "linear",
        y_axis_type="log" if drawn.is_log else "linear",
        x_axis_label=drawn.x_name,
        x_range=DataRange1d(range_padding=0.02, only_visible=True),
        y_range=DataRange1d(only_visible=True),
        window_axis="x",
    )
    if not drawn.has_log_x:
        made.xaxis.formatter, made.xaxis.ticker = NumeralTickFormatter(format="0,0"), BasicTicker(min_interval=1)
    if drawn.is_percent:
        made.yaxis.formatter = NumeralTickFormatter(format="0.[0]%")
    for place, (role, colour, has_points) in enumerate(drawn.strokes):
        source = ColumnDataSource({"x": [], "y": []}, name=f"line {place}")
        style = {"name": str(place), "line_color": colour, "line_width": 2} | _STYLES.get(role, {})
        made.line("x", "y", source=source, **style)
        if has_points:
            made.scatter("x", "y", source=source, name=str(place), color=colour, size=7)
    for step, word in drawn.markers:
        made.add_layout(Span(location=step, dimension="height", line_color=_GREY, line_dash="dashed"))
        style = {"text_color": _GREY, "text_font_size": "10px", "angle": math.pi / 2, "x_offset": 12}
        made.add_layout(Label(x=step, y=6, y_units="screen", text=word, **style))
    return json_item(made)


def _draw_map(plot: MapPlot) -> figure:
    rows, columns = (each.ravel() for each in np.indices(plot.values.shape))
    data = {
        "x": columns,
        "y": rows,
        "column": np.array(plot.columns)[columns].tolist(),
        "layer": np.array(plot.layers)[rows],
        "shade": plot.shades.ravel().round(2),
        "value": plot.values.ravel().round(3),
    }
    colours = interp_palette(_DIVERGING if plot.is_diverging else _SEQUENTIAL, _SHADES)
    ends = [shade for shade, _ in plot.ticks]
    mapper = LinearColorMapper(palette=colours, low=ends[0], high=ends[-1])
    told = [("layer", "@layer"), (plot.x_name, "@column"), ("value", "@value{0.[00]}")]
    made = _empty(tools=[HoverTool(tooltips=told)], x_axis_label=plot.x_name, y_axis_label="layer")
    fill = {"field": "shade", "transform": mapper}
    made.rect("x", "y", 1, 1, source=ColumnDataSource(data), fill_color=fill, line_color=fill, line_width=0.5)
    made.x_range.range_padding = made.y_range.range_padding = 0
    for axis, texts in ((made.xaxis, plot.columns), (made.yaxis, plot.layers)):
        axis.ticker = BasicTicker(desired_num_ticks=12, min_interval=1)
        axis.major_label_overrides = {place: str(text) for place, text in enumerate(texts)}
    bar = ColorBar(color_mapper=mapper, ticker=FixedTicker(ticks=ends), width=8, background_fill_color=None)
    bar.major_label_overrides = dict(plot.ticks)
    made.add_layout(bar, "right")
    return made


def _draw_parallel(plot: ParallelPlot) -> figure:
    """Parallel axes scaled from 0 to 1; page.js dims trials outside the reader's selection."""
    last = len(plot.axes) - 1
    scales = [_CoordinateScale(axis, [row[place] for row in plot.rows]) for place, axis in enumerate(plot.axes)]
    heights = [[scale.height(value) for scale, value in zip(scales, row, strict=True)] for row in plot.rows]
    values = [float(row[-1]) for row in plot.rows]
    colours = _BEST_TO_WORST[::-1] if plot.is_maximized else _BEST_TO_WORST
    mapper = LinearColorMapper(palette=interp_palette(colours, _SHADES), low=min(values), high=max(values))
    columns = [f"axis {place}" for place in range(last + 1)]
    texts = [[_text(value) for value in column] for column in zip(*plot.rows, strict=True)]
    data = {"xs": [list(range(last + 1))] * len(values), "ys": heights, "value": values, "alpha": [0.8] * len(values)}
    source = ColumnDataSource(data | dict(zip(columns, texts, strict=True)), name="trials")
    told = [(axis.name, f"@{{{column}}}") for axis, column in zip(plot.axes, columns, strict=True)]
    ranges = {"x_range": Range1d(-0.35, last + 0.35), "y_range": Range1d(-0.08, 1.16)}
    made = _empty(tools=[BoxSelectTool(renderers=[])], **ranges)
    made.axis.visible = made.grid.visible = False
    colour = {"field": "value", "transform": mapper}
    lines = made.multi_line("xs", "ys", source=source, line_color=colour, line_alpha="alpha", line_width=2)
    made.add_tools(HoverTool(tooltips=told, renderers=[lines]))
    made.segment([*range(last + 1)], 0, [*range(last + 1)], 1, line_color=_GREY)
    style = {"text_color": _GREY, "text_font_size": "11px"}
    for place, (axis, scale) in enumerate(zip(plot.axes, scales, strict=True)):
        made.add_layout(Label(x=place, y=1.06, text=axis.name, text_align="center", **style))
        for height, text in scale.labels():
            made.add_layout(Label(x=place, y=height, x_offset=6, text=text, text_baseline="middle", **style))
    return made


class _CoordinateScale:
    """Maps the values of an axis of parallel coordinates to heights from 0 to 1."""

    def __init__(self, axis: CoordinateAxis, values: Any) -> None:  # noqa: ANN401 - numbers, or texts of choices
        self.axis = axis
        if not axis.choices:
            least, greatest = axis.ends
            self.low = self._number(min(values) if least is None else least)
            self.high = self._number(max(values) if greatest is None else greatest)

    def _number(self, value: float | str) -> float:
        return math.log(float(value)) if self.axis.is_log else float(value)

    def height(self, value: float | str) -> float:
        """The height of a value; 0.5 if all values are equal."""
        if self.axis.choices:
            return self.axis.choices.index(str(value)) / (len(self.axis.choices) - 1) if self.axis.choices[1:] else 0.5
        return 0.5 if self.high == self.low else (self._number(value) - self.low) / (self.high - self.low)

    def labels(self) -> list[tuple[float, str]]:
        """Heights of axis labels with their texts."""
        if self.axis.choices:
            return [(self.height(choice), choice) for choice in self.axis.choices]
        shares = [0.5] if self.high == self.low else [0.0, 0.25, 0.5, 0.75, 1.0]
        numbers = [self.low + share * (self.high - self.low) for share in shares]
        texts = [_text(math.exp(number) if self.axis.is_log else number) for number in numbers]
        return list(zip(shares, texts, strict=True))


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"

"""Draws charts as bokeh figures.

Figures have no colours for text, grid and background, because the page sets those of its theme. A figure of lines is
drawn without values: the page fills the source `line N` of the renderer `N` with line N.
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
    Span,
)
from bokeh.palettes import interp_palette
from bokeh.plotting import figure

from ds_finetune.errors import DependencyError
from ds_finetune.runs.report.charts import Chart, HeatMap

_GREY = "#7b8494"
_DIVERGING = ("#2c5fa8", "#7fa8d9", "#d9dce2", "#eda36e", "#c2410c")
_SEQUENTIAL = ("#e8edf5", "#a9c4ea", "#5f93dc", "#2f63b8", "#173a78")
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
    """The chart as JSON for `Bokeh.embed`, and a second time with a logarithmic axis if the chart can have one.

    Charts of lines that differ only in names and values share one object.
    """
    if chart.heat_map is not None:
        return [json_item(_draw_map(chart.heat_map))]
    strokes = tuple((line.role, line.hex_colour, np.size(line.x) == 1) for line in chart.lines)
    has_whole_x = all(np.issubdtype(np.asarray(line.x).dtype, np.integer) for line in chart.lines)
    axes = (chart.x_name, chart.has_log_x, has_whole_x, chart.x_texts, chart.number == "percent", tuple(chart.markers))
    return [_line_item(_LineFigure(strokes, *axes, is_log)) for is_log in (False, True)[: 1 + chart.can_be_logarithmic]]


class _LineFigure(NamedTuple):
    """Cache key of a figure of lines; each stroke has a role, a colour, and whether the line has only one point."""

    strokes: tuple[tuple[str, str, bool], ...]
    x_name: str
    has_log_x: bool
    has_whole_x: bool
    x_texts: tuple[str, ...]
    is_percent: bool
    markers: tuple[tuple[int, str], ...]
    is_log: bool


def _empty(**settings: Any) -> figure:  # noqa: ANN401 - settings of bokeh
    frame = {"toolbar_location": None, "sizing_mode": "stretch_both", "min_border_right": 20}
    fills = {"background_fill_color": None, "border_fill_color": None, "outline_line_color": None}
    plot = figure(**{**frame, **fills, **settings})
    plot.xgrid.visible = False
    plot.axis.minor_tick_line_color = None
    return plot


@lru_cache(maxsize=256)
def _line_item(key: _LineFigure) -> Any:  # noqa: ANN401 - JSON
    """A figure of lines as JSON; drawing one takes 40 ms."""
    plot = _empty(
        tools=[CrosshairTool(dimensions="height", line_color=_GREY), BoxZoomTool(dimensions="width")],
        x_axis_type="log" if key.has_log_x else "linear",
        y_axis_type="log" if key.is_log else "linear",
        x_axis_label=key.x_name,
        x_range=DataRange1d(range_padding=0.02, only_visible=True),
        y_range=DataRange1d(only_visible=True),
        window_axis="x",
    )
    if key.x_texts:
        plot.xaxis.ticker = FixedTicker(ticks=[*range(len(key.x_texts))])
        plot.xaxis.major_label_overrides = dict(enumerate(key.x_texts))
    elif key.has_whole_x:
        plot.xaxis.formatter, plot.xaxis.ticker = NumeralTickFormatter(format="0,0"), BasicTicker(min_interval=1)
    if key.is_percent:
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]%")
    for number, (role, colour, is_point) in enumerate(key.strokes):
        source = ColumnDataSource({"x": [], "y": []}, name=f"line {number}")
        if role != "dots":
            style = {"name": str(number), "line_color": colour, "line_width": 2} | _STYLES.get(role, {})
            plot.line("x", "y", source=source, **style)
        if is_point or role in ("points", "dots"):
            plot.scatter("x", "y", source=source, name=str(number), color=colour, size=7)
    for step, label in key.markers:
        plot.add_layout(Span(location=step, dimension="height", line_color=_GREY, line_dash="dashed"))
        style = {"text_color": _GREY, "text_font_size": "10px", "angle": math.pi / 2, "x_offset": 12}
        plot.add_layout(Label(x=step, y=6, y_units="screen", text=label, **style))
    return json_item(plot)


def _draw_map(heat_map: HeatMap) -> figure:
    rows, columns = (each.ravel() for each in np.indices(heat_map.values.shape))
    data = {
        "x": columns,
        "y": rows,
        "column": np.array(heat_map.columns)[columns].tolist(),
        "layer": np.array(heat_map.layers)[rows],
        "shade": heat_map.shades.ravel().round(2),
        "value": heat_map.values.ravel().round(3),
    }
    colours = interp_palette(_DIVERGING if heat_map.is_diverging else _SEQUENTIAL, _SHADES)
    ends = [shade for shade, _ in heat_map.ticks]
    mapper = LinearColorMapper(palette=colours, low=ends[0], high=ends[-1])
    tooltips = [("layer", "@layer"), (heat_map.x_name, "@column"), ("value", "@value{0.[00]}")]
    plot = _empty(tools=[HoverTool(tooltips=tooltips)], x_axis_label=heat_map.x_name, y_axis_label="layer")
    fill = {"field": "shade", "transform": mapper}
    plot.rect("x", "y", 1, 1, source=ColumnDataSource(data), fill_color=fill, line_color=fill, line_width=0.5)
    plot.x_range.range_padding = plot.y_range.range_padding = 0
    for axis, texts in ((plot.xaxis, heat_map.columns), (plot.yaxis, heat_map.layers)):
        axis.ticker = BasicTicker(desired_num_ticks=12, min_interval=1)
        axis.major_label_overrides = {index: str(text) for index, text in enumerate(texts)}
    bar = ColorBar(color_mapper=mapper, ticker=FixedTicker(ticks=ends), width=8, background_fill_color=None)
    bar.major_label_overrides = dict(heat_map.ticks)
    plot.add_layout(bar, "right")
    return plot

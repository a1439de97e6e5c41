"""Options of Apache ECharts as plain values: lines over steps, and heat maps.

They have no colours of text, grid and background: those are the theme of the page that draws them, so that light and
dark need one option. Numbers are formatted by the page too, since an option cannot hold functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PALETTE = ("#3b7ddd", "#e0701a", "#17966b", "#9460d8", "#d8446a", "#128fa6", "#a67c1b", "#6b7685")
"""Each has a contrast of 3 or more with the page's light and dark background."""
_SIGNIFICANT = 6
_DIVERGING = ("#2c5fa8", "#7fa8d9", "#d9dce2", "#eda36e", "#c2410c")
_SEQUENTIAL = ("#e8edf5", "#a9c4ea", "#5f93dc", "#2f63b8", "#173a78")


@dataclass(frozen=True)
class Line:
    """Values [n] over steps [n], ascending; NaN leaves a gap.

    `role` is `line`, `faint` (behind a smoothed line) or `points` (joined by a thin line). `colour` is a number of the
    palette.
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    role: str = "line"
    colour: int = 0


def line_option(lines: Sequence[Line], *, markers: Sequence[tuple[int, str]] = ()) -> dict[str, Any]:
    """Lines over steps; each marker is a vertical line at a step with a word."""
    names = [line.name for line in lines]
    series = [_series(line, has_twin=names.count(line.name) > 1) for line in lines]
    if markers and series:
        series[0]["markLine"] = _vertical_lines(markers)
    last = max((int(line.steps[-1]) for line in lines if len(line.steps)), default=1)
    first = min((int(line.steps[0]) for line in lines if len(line.steps)), default=0)
    return {
        "animation": False,
        "grid": {"left": 8, "right": 20, "top": 34, "bottom": 26, "containLabel": True},
        "legend": {"top": 0, "left": 0, "type": "scroll", "itemWidth": 16, "itemHeight": 8, "itemGap": 14},
        "tooltip": {"trigger": "axis", "confine": True, "axisPointer": {"type": "line"}},
        "xAxis": {
            "type": "value",
            "name": "step",
            "nameLocation": "middle",
            "nameGap": 24,
            "min": first,
            "max": max(last, first + 1),
            "minInterval": 1,
            "splitLine": {"show": False},
            "splitNumber": 6,
            "axisLabel": {"hideOverlap": True, "alignMinLabel": "left", "alignMaxLabel": "right"},
        },
        "yAxis": {"type": "value", "scale": True, "splitNumber": 4, "axisLabel": {"hideOverlap": True}},
        "dataZoom": [{"type": "inside", "zoomOnMouseWheel": "ctrl", "moveOnMouseWheel": False}],
        "series": series,
    }


def _series(line: Line, *, has_twin: bool) -> dict[str, Any]:
    """A line; of two lines of one name, which the legend shows once, a faint one has no text below the pointer."""
    colour = PALETTE[line.colour % len(PALETTE)]
    is_faint, has_points = line.role == "faint", line.role == "points"
    return {
        "type": "line",
        "name": line.name,
        "data": _points(line),
        "showSymbol": has_points or len(line.steps) == 1,
        "symbol": "circle",
        "symbolSize": 7 if has_points else 5,
        "connectNulls": has_points,
        "itemStyle": {"color": colour},
        "lineStyle": {"color": colour, "width": 1 if is_faint else 2, "opacity": 0.45 if is_faint else 1.0},
        "emphasis": {"disabled": True},
        "tooltip": {"show": not (is_faint and has_twin)},
        "z": 2 if is_faint else 4 if has_points else 3,
    }


def _points(line: Line) -> list[list[float | None]]:
    """Pairs of a step and a value of six significant digits."""
    return [
        [int(step), float(f"{value:.{_SIGNIFICANT}g}") if np.isfinite(value) else None]
        for step, value in zip(line.steps.tolist(), line.values.tolist(), strict=True)
    ]


def _vertical_lines(markers: Sequence[tuple[int, str]]) -> dict[str, Any]:
    return {
        "silent": True,
        "symbol": "none",
        "lineStyle": {"type": "dashed", "width": 1},
        "label": {"show": True, "formatter": "{b}", "position": "insideEndTop", "fontSize": 10},
        "data": [{"xAxis": step, "name": word} for step, word in markers],
    }


def load_map_option(loads: NDArray[np.float64], layers: Sequence[int]) -> dict[str, Any]:
    """A heat map of the loads [layers, experts] relative to the mean load of their layer, on a scale of 1/4 to 4."""
    shades = np.log2(np.clip(loads, 0.25, 4.0))
    cells = [
        [expert, row, round(float(shades[row, expert]), 2), round(float(loads[row, expert]), 3)]
        for row in range(loads.shape[0])
        for expert in range(loads.shape[1])
    ]
    option = _heat_map([str(expert) for expert in range(loads.shape[1])], [str(layer) for layer in layers], cells)
    option["visualMap"] |= {"min": -2, "max": 2, "text": ["4x the mean load", "1/4"], "inRange": {"color": _DIVERGING}}
    option["xAxis"]["name"] = "expert"
    return option


def value_map_option(values: NDArray[np.float64], layers: Sequence[int], steps: Sequence[int]) -> dict[str, Any]:
    """A heat map of values [steps, layers] of 0 or more: a column for each step and a row for each layer."""
    cells = [
        [column, row, round(float(values[column, row]), 3), round(float(values[column, row]), 3)]
        for column in range(values.shape[0])
        for row in range(values.shape[1])
    ]
    option = _heat_map([f"{step:,}" for step in steps], [str(layer) for layer in layers], cells)
    most = float(np.nanmax(values)) if values.size else 0.0
    top = max(round(most, 2), 0.1)
    option["visualMap"] |= {"min": 0, "max": top, "text": [f"{top:g}", "0"], "inRange": {"color": _SEQUENTIAL}}
    option["xAxis"]["name"] = "step"
    return option


def _heat_map(columns: list[str], rows: list[str], cells: list[list[float]]) -> dict[str, Any]:
    return {
        "animation": False,
        "grid": {"left": 28, "right": 20, "top": 36, "bottom": 30, "containLabel": True},
        "tooltip": {"confine": True},
        "visualMap": {
            "type": "continuous",
            "dimension": 2,
            "orient": "horizontal",
            "right": 12,
            "top": 0,
            "itemHeight": 120,
            "itemWidth": 12,
            "calculable": False,
            "hoverLink": False,
        },
        "xAxis": {
            "type": "category",
            "data": columns,
            "nameLocation": "middle",
            "nameGap": 26,
            "axisLabel": {"hideOverlap": True},
            "axisTick": {"show": False},
        },
        "yAxis": {
            "type": "category",
            "data": rows,
            "name": "layer",
            "nameLocation": "end",
            "inverse": False,
            "axisLabel": {"hideOverlap": True},
            "axisTick": {"show": False},
        },
        "series": [{"type": "heatmap", "data": cells, "progressive": 0, "emphasis": {"disabled": True}}],
    }

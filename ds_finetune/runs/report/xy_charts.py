"""Options of Apache ECharts for experiments: lines over numbers, and parallel coordinates of trials.

As in `runs/report/charts.py` they have no colours of text, grid and background, which are the page's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_finetune.runs.report.charts import PALETTE

_SCALE = ("#2563eb", "#12a594", "#f2b134", "#d8446a")
"""Of the values of trials, from the best to the worst."""


@dataclass(frozen=True)
class XyLine:
    """Values [n] over numbers [n]; `role` is `line`, `faint`, `points` (joined by a thin line) or `dashed`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    role: str = "line"
    colour: int = 0


def xy_option(lines: Sequence[XyLine], *, x_name: str, is_log: bool = False, is_whole: bool = False) -> dict[str, Any]:
    """Lines over a number with a name, on a logarithmic axis if `is_log`, labelled by whole numbers if `is_whole`."""
    return {
        "animation": False,
        "grid": {"left": 8, "right": 24, "top": 34, "bottom": 26, "containLabel": True},
        "legend": {"top": 0, "left": 0, "type": "scroll", "itemWidth": 16, "itemHeight": 8, "itemGap": 14},
        "tooltip": {"trigger": "axis", "confine": True, "axisPointer": {"type": "line"}},
        "xAxis": {
            "type": "log" if is_log else "value",
            "name": x_name,
            "nameLocation": "middle",
            "nameGap": 24,
            "min": min(min(line.x) for line in lines),
            "max": max(max(line.x) for line in lines),
            "minInterval": 1 if is_whole else 0,
            "splitLine": {"show": False},
            "axisLabel": {"hideOverlap": True},
        },
        "yAxis": {"type": "value", "scale": True, "splitNumber": 4, "axisLabel": {"hideOverlap": True}},
        "series": [_series(line) for line in lines],
    }


def _series(line: XyLine) -> dict[str, Any]:
    colour = PALETTE[line.colour % len(PALETTE)]
    width = 1 if line.role in ("faint", "dashed") else 2
    return {
        "type": "line",
        "name": line.name,
        "data": [[float(f"{x:.6g}"), float(f"{y:.6g}")] for x, y in zip(line.x, line.y, strict=True)],
        "showSymbol": line.role == "points",
        "symbol": "circle",
        "symbolSize": 8,
        "itemStyle": {"color": colour},
        "lineStyle": {
            "color": colour,
            "width": width,
            "opacity": 0.45 if line.role == "faint" else 1.0,
            "type": "dashed" if line.role == "dashed" else "solid",
        },
        "emphasis": {"disabled": True},
    }


@dataclass(frozen=True)
class CoordinateAxis:
    """One axis of parallel coordinates: numbers, on a logarithmic scale where `is_log`, or texts of `choices`."""

    name: str
    is_log: bool = False
    choices: tuple[str, ...] = ()
    ends: tuple[float | None, float | None] = (None, None)
    """Least and greatest number; those of the rows where they are None."""


def parallel_option(
    axes: Sequence[CoordinateAxis], rows: Sequence[Sequence[float | str]], *, is_maximized: bool
) -> dict[str, Any]:
    """A line for each row over the axes; the last axis holds the value by which lines are coloured.

    Readers narrow each axis by dragging along it.
    """
    values = [float(row[-1]) for row in rows]
    return {
        "animation": False,
        "tooltip": {"confine": True},
        "parallel": {"left": 60, "right": 90, "top": 40, "bottom": 30},
        "parallelAxis": [_parallel_axis(number, axis) for number, axis in enumerate(axes)],
        "visualMap": {
            "type": "continuous",
            "show": False,
            "dimension": len(axes) - 1,
            "min": min(values),
            "max": max(values) if max(values) > min(values) else min(values) + 1,
            "inRange": {"color": list(reversed(_SCALE)) if is_maximized else list(_SCALE)},
        },
        "series": [
            {
                "type": "parallel",
                "smooth": False,
                "lineStyle": {"width": 2, "opacity": 0.8},
                "data": [list(row) for row in rows],
            }
        ],
    }


def _parallel_axis(number: int, axis: CoordinateAxis) -> dict[str, Any]:
    shown: dict[str, Any] = {"dim": number, "name": axis.name, "nameTextStyle": {"fontSize": 11}}
    if axis.choices:
        return {**shown, "type": "category", "data": list(axis.choices)}
    ends = {name: end for name, end in zip(("min", "max"), axis.ends, strict=True) if end is not None}
    return {**shown, "type": "log" if axis.is_log else "value", "scale": True, **ends}

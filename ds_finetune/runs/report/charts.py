"""What the charts of a page hold, as plain values that `templates/plots.js` draws with BokehJS: lines, heat maps and
parallel coordinates.

BokehJS is one script that the package bokeh installs. Charts have no colours of text, grid and background: those
are the page's, so that light and dark need one chart.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_finetune.errors import DependencyError
from ds_finetune.runs.curves import rounded
from ds_finetune.system.versions import pip_install, range_text, requirements_of

PLOTS = Path(__file__).parent / "templates" / "plots.js"
PALETTE = ("#3b7ddd", "#e0701a", "#17966b", "#9460d8", "#d8446a", "#128fa6", "#a67c1b", "#6b7685")
"""Each has a contrast of 3 or more with the page's light and dark background."""
_DIVERGING = ("#2c5fa8", "#7fa8d9", "#d9dce2", "#eda36e", "#c2410c")
_SEQUENTIAL = ("#e8edf5", "#a9c4ea", "#5f93dc", "#2f63b8", "#173a78")
_BEST_TO_WORST = ("#2563eb", "#12a594", "#f2b134", "#d8446a")
"""Colours of the values of trials."""


@dataclass(frozen=True)
class Line:
    """Values [n] over numbers [n], which ascend; NaN leaves a gap.

    `role` is `line`, `faint` (behind a smoothed line), `points` (joined by a line) or `dashed`. `colour` is a number of
    the palette.
    """

    name: str
    x: ArrayLike
    y: ArrayLike
    role: str = "line"
    colour: int = 0


@dataclass(frozen=True)
class NumberAxis:
    """The horizontal axis of lines: its name, whether it is logarithmic, and whether its labels are whole numbers."""

    name: str = "step"
    is_log: bool = False
    is_whole: bool = True


STEPS = NumberAxis()


def line_plot(
    lines: Sequence[Line], axis: NumberAxis = STEPS, *, markers: Iterable[tuple[int, str]] = ()
) -> dict[str, Any]:
    """Lines over steps or another number; each marker is a vertical line at a step with a word."""
    return {
        "kind": "lines",
        "x": asdict(axis),
        "lines": [
            {
                "name": line.name,
                "role": line.role,
                "colour": PALETTE[line.colour % len(PALETTE)],
                "points": _points(np.asarray(line.x), np.asarray(line.y, dtype=np.float64)),
            }
            for line in lines
        ],
        "markers": list(markers),
    }


def _points(x: NDArray[Any], y: NDArray[np.float64]) -> list[list[float | None]]:
    """Pairs of a number and a value of six significant digits; steps are exact."""
    numbers = x.tolist() if np.issubdtype(x.dtype, np.integer) else rounded(x.tolist())
    return [[number, value] for number, value in zip(numbers, rounded(y.tolist()), strict=True)]


def load_map_plot(loads: NDArray[np.float64], layers: Sequence[int]) -> dict[str, Any]:
    """A heat map of the loads [layers, experts] relative to the mean load of their layer, on a scale of 1/4 to 4."""
    shades = np.log2(np.clip(loads, 0.25, 4.0))
    cells = [
        [expert, row, round(float(shades[row, expert]), 2), round(float(loads[row, expert]), 3)]
        for row in range(loads.shape[0])
        for expert in range(loads.shape[1])
    ]
    scale = {"low": -2, "high": 2, "texts": ["1/4", "4x the mean load"], "colours": _DIVERGING}
    return _heat_map("expert", [str(expert) for expert in range(loads.shape[1])], layers, cells) | {"scale": scale}


def value_map_plot(values: NDArray[np.float64], layers: Sequence[int], steps: Sequence[int]) -> dict[str, Any]:
    """A heat map of values [steps, layers] of 0 or more: a column for each step and a row for each layer."""
    cells = [
        [column, row, round(float(values[column, row]), 3), round(float(values[column, row]), 3)]
        for column in range(values.shape[0])
        for row in range(values.shape[1])
    ]
    most = float(np.nanmax(values)) if values.size else 0.0
    top = max(round(most, 2), 0.1)
    scale = {"low": 0, "high": top, "texts": ["0", f"{top:g}"], "colours": _SEQUENTIAL}
    return _heat_map("step", [f"{step:,}" for step in steps], layers, cells) | {"scale": scale}


def _heat_map(x: str, columns: list[str], layers: Sequence[int], cells: list[list[float]]) -> dict[str, Any]:
    """Each cell is a column, a row, its shade on the scale and its value."""
    return {"kind": "map", "x": x, "columns": columns, "rows": [str(layer) for layer in layers], "cells": cells}


@dataclass(frozen=True)
class CoordinateAxis:
    """One axis of parallel coordinates: numbers, on a logarithmic scale where `is_log`, or texts of `choices`."""

    name: str
    is_log: bool = False
    choices: tuple[str, ...] = ()
    ends: tuple[float | None, float | None] = (None, None)
    """Least and greatest number; those of the rows where they are None."""


def parallel_plot(
    axes: Sequence[CoordinateAxis], rows: Sequence[Sequence[float | str]], *, is_maximized: bool
) -> dict[str, Any]:
    """A line for each row over the axes; the last axis holds the value by which lines are coloured.

    Readers narrow each axis by dragging along it.
    """
    return {
        "kind": "parallel",
        "axes": [asdict(axis) for axis in axes],
        "rows": [list(row) for row in rows],
        "colours": _BEST_TO_WORST[::-1] if is_maximized else _BEST_TO_WORST,
    }


def bokehjs() -> Path:
    """The script of BokehJS, which defines the global `Bokeh`. It is found without an import of bokeh.

    Raises:
        DependencyError: bokeh is missing or too old or new, or was installed without its scripts.
    """
    lines = [line for line in requirements_of() if line.name == "bokeh"]
    hint = pip_install(*lines)
    try:
        bokeh = distribution("bokeh")
    except PackageNotFoundError as missing:
        raise DependencyError("charts need the package bokeh, which is not installed", hint=hint) from missing
    for line in lines:
        if not line.specifier.contains(bokeh.version):
            raise DependencyError(f"charts need bokeh {range_text(line)}, and {bokeh.version} is installed", hint=hint)
    script = Path(str(bokeh.locate_file("bokeh/server/static/js/bokeh.min.js")))
    if not script.is_file():
        reason = f"bokeh {bokeh.version} is installed without `{script}`"
        raise DependencyError(reason, hint=f"{hint} --force-reinstall")
    return script

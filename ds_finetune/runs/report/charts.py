"""Data of charts: lines, heat maps and parallel coordinates, which report/figures.py draws."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

PALETTE = ("#3b7ddd", "#e0701a", "#17966b", "#9460d8", "#d8446a", "#128fa6", "#a67c1b", "#6b7685")
"""Colours with a contrast of 3 or more to the page's light and dark background."""


@dataclass(frozen=True)
class Line:
    """Values y [n] over ascending numbers x [n]; NaN leaves a gap.

    `role` is `line`, `faint` (behind a smoothed line), `points` (joined by a line) or `dashed`. `colour` is an index of
    the palette, `run` the index of the run on the page. Later steps may change the last `reach` steps' values.
    """

    name: str
    x: ArrayLike
    y: ArrayLike
    role: str = "line"
    colour: int = 0
    run: int = 0
    reach: int = 0

    @property
    def hex_colour(self) -> str:
        """The colour in HTML notation."""
        return PALETTE[self.colour % len(PALETTE)]


@dataclass(frozen=True)
class LinePlot:
    """Lines over steps or another number; each marker is a labelled vertical line at a step."""

    lines: Sequence[Line]
    x_name: str = "step"
    has_log_x: bool = False
    markers: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class MapPlot:
    """A heat map of values [rows, columns], coloured by shades [rows, columns] from `low` to `high`.

    `ticks` are labelled shades; `is_diverging` selects colours with grey in the middle.
    """

    x_name: str
    columns: Sequence[str]
    layers: Sequence[int]
    values: NDArray[np.float64]
    shades: NDArray[np.float64]
    ticks: Sequence[tuple[float, str]]
    is_diverging: bool = False


def load_map(loads: NDArray[np.float64], layers: Sequence[int]) -> MapPlot:
    """A heat map of loads [layers, experts] relative to the layer's mean load, on a scale of 1/4 to 4."""
    experts = [str(expert) for expert in range(loads.shape[1])]
    ticks = ((-2.0, "1/4"), (0.0, "mean load"), (2.0, "4x"))
    return MapPlot("expert", experts, layers, loads, np.log2(np.clip(loads, 0.25, 4.0)), ticks, is_diverging=True)


def value_map(values: NDArray[np.float64], layers: Sequence[int], steps: Sequence[int]) -> MapPlot:
    """A heat map of values [layers, steps] of 0 or more."""
    top = max(round(float(np.nanmax(values)), 2), 0.1) if values.size else 0.1
    return MapPlot("step", [f"{step:,}" for step in steps], layers, values, values, ((0.0, "0"), (top, f"{top:g}")))


@dataclass(frozen=True)
class CoordinateAxis:
    """One axis of parallel coordinates: numbers, with `is_log` on a logarithmic scale, or the texts `choices`."""

    name: str
    is_log: bool = False
    choices: tuple[str, ...] = ()
    ends: tuple[float | None, float | None] = (None, None)
    """Smallest and largest number; None takes that of the rows."""


@dataclass(frozen=True)
class ParallelPlot:
    """A line for each row across the axes; the last axis has the value that colours the lines."""

    axes: Sequence[CoordinateAxis]
    rows: Sequence[Sequence[float | str]]
    is_maximized: bool

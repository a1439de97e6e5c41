"""What charts show, as plain values: lines, heat maps and parallel coordinates. report/figures.py draws them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

PALETTE = ("#3b7ddd", "#e0701a", "#17966b", "#9460d8", "#d8446a", "#128fa6", "#a67c1b", "#6b7685")
"""Each has a contrast of 3 or more with the page's light and dark background."""


@dataclass(frozen=True)
class Line:
    """Values [n] over numbers [n], which ascend; NaN leaves a gap.

    `role` is `line`, `faint` (behind a smoothed line), `points` (joined by a line) or `dashed`. `colour` is a number of
    the palette. Of run number `run` of the page, steps to come may change the values of the last `reach` steps.
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
        """The colour as HTML writes it."""
        return PALETTE[self.colour % len(PALETTE)]


@dataclass(frozen=True)
class LinePlot:
    """Lines over steps or another number; each marker is a vertical line at a step with a word."""

    lines: Sequence[Line]
    x_name: str = "step"
    has_log_x: bool = False
    markers: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class MapPlot:
    """A heat map of values [rows, columns], coloured by shades [rows, columns] from `low` to `high`.

    `ticks` are shades with a text; `is_diverging` has grey in the middle.
    """

    x_name: str
    columns: Sequence[str]
    layers: Sequence[int]
    values: NDArray[np.float64]
    shades: NDArray[np.float64]
    ticks: Sequence[tuple[float, str]]
    is_diverging: bool = False


def load_map(loads: NDArray[np.float64], layers: Sequence[int]) -> MapPlot:
    """A heat map of the loads [layers, experts] relative to the mean load of their layer, on a scale of 1/4 to 4."""
    experts = [str(expert) for expert in range(loads.shape[1])]
    ticks = ((-2.0, "1/4"), (0.0, "mean load"), (2.0, "4x"))
    return MapPlot("expert", experts, layers, loads, np.log2(np.clip(loads, 0.25, 4.0)), ticks, is_diverging=True)


def value_map(values: NDArray[np.float64], layers: Sequence[int], steps: Sequence[int]) -> MapPlot:
    """A heat map of values [layers, steps] of 0 or more."""
    top = max(round(float(np.nanmax(values)), 2), 0.1) if values.size else 0.1
    return MapPlot("step", [f"{step:,}" for step in steps], layers, values, values, ((0.0, "0"), (top, f"{top:g}")))


@dataclass(frozen=True)
class CoordinateAxis:
    """One axis of parallel coordinates: numbers, on a logarithmic scale where `is_log`, or texts of `choices`."""

    name: str
    is_log: bool = False
    choices: tuple[str, ...] = ()
    ends: tuple[float | None, float | None] = (None, None)
    """Least and greatest number; those of the rows where they are None."""


@dataclass(frozen=True)
class ParallelPlot:
    """A line for each row over the axes; the last axis holds the value by which lines are coloured."""

    axes: Sequence[CoordinateAxis]
    rows: Sequence[Sequence[float | str]]
    is_maximized: bool

"""Data of charts, lines or a heat map, which report/figures.py draws."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

PALETTE = ("#3b7ddd", "#e0701a", "#17966b", "#9460d8", "#d8446a", "#128fa6", "#a67c1b", "#6b7685")
"""Line colours, each with a contrast of 3 or more to the page's light and dark background."""


@dataclass(frozen=True)
class Line:
    """Values y [n] over ascending numbers x [n]; NaN leaves a gap.

    `role` is `line`, `faint` (behind a smoothed line), `points` (joined by a line), `dots` (not joined) or `dashed`.
    `colour` is an index of the palette.
    """

    name: str
    x: ArrayLike
    y: ArrayLike
    role: str = "line"
    colour: int = 0

    @property
    def hex_colour(self) -> str:
        """The line's colour in HTML notation."""
        return PALETTE[self.colour % len(PALETTE)]


@dataclass(frozen=True)
class HeatMap:
    """A heat map of values [layers, columns], coloured by shades [layers, columns].

    `ticks` are shades with their labels in the colour bar, whose ends are the first and the last tick. `is_diverging`
    selects colours with grey in the middle.
    """

    x_name: str
    columns: Sequence[str]
    layers: Sequence[int]
    values: NDArray[np.float64]
    shades: NDArray[np.float64]
    ticks: Sequence[tuple[float, str]]
    is_diverging: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of lines over steps or other numbers, or a heat map.

    `number` is the format of numbers: `number`, `percent`, `seconds`, `gib` or `ratio`. `summary` is the text for
    screen readers. Each marker is a step with the label of its vertical line. With `x_texts`, x is an index of them.
    """

    title: str
    lines: Sequence[Line]
    summary: str
    number: str = "number"
    x_name: str = "step"
    has_log_x: bool = False
    x_texts: tuple[str, ...] = ()
    markers: Sequence[tuple[int, str]] = ()
    heat_map: HeatMap | None = None
    can_be_logarithmic: bool = False
    is_wide: bool = False
    height: int = 260
    """Height in pixels."""
    note: str = ""

    @property
    def legend(self) -> dict[str, str]:
        """Colour of each name in the legend."""
        return {line.name: line.hex_colour for line in self.lines}

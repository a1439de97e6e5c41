"""The few cells that tests choose hold what the many hold."""

from itertools import combinations, product
from typing import Any

import pytest

from tests.pairwise import each_value, in_threes, pairwise

CELLS = [cell for cell in product("abc", range(4), "xy", (True, False)) if cell[:2] != ("a", 3)]


@pytest.mark.parametrize(("choose", "together", "most"), [(pairwise, 2, 12), (in_threes, 3, 24)])
def test_values_that_occur_together_are_in_few_cells(choose: Any, together: int, most: int) -> None:
    """Pairs need twelve cells at least: three letters times four numbers, but for the pair that no cell has."""
    chosen = choose(CELLS, lambda cell: cell)
    held = [set().union(*(combinations(enumerate(cell), together) for cell in cells)) for cells in (CELLS, chosen)]
    assert held[0] == held[1]
    assert len(chosen) <= most
    assert chosen == choose(CELLS, lambda cell: cell), "another process would choose others"


def test_every_value_is_in_as_many_cells_as_the_longest_axis_has() -> None:
    chosen = each_value(CELLS, lambda cell: cell)
    assert all(
        set(axis) == set(wanted)
        for axis, wanted in zip(zip(*chosen, strict=True), zip(*CELLS, strict=True), strict=True)
    )
    assert len(chosen) == 4

"""The few cells that tests choose hold what the many hold."""

from itertools import combinations, product

from tests.pairwise import each_value, pairwise

CELLS = [cell for cell in product("abc", range(4), "xy", (True, False)) if cell[:2] != ("a", 3)]


def test_every_pair_of_values_is_in_few_cells() -> None:
    """Twelve cells at least: three letters times four numbers, but for the pair that no cell has."""
    chosen = pairwise(CELLS, lambda cell: cell)
    pairs = [set().union(*(combinations(enumerate(cell), 2) for cell in cells)) for cells in (CELLS, chosen)]
    assert pairs[0] == pairs[1]
    assert len(chosen) <= 12
    assert chosen == pairwise(CELLS, lambda cell: cell), "another process would choose others"


def test_every_value_is_in_as_many_cells_as_the_longest_axis_has() -> None:
    chosen = each_value(CELLS, lambda cell: cell)
    assert all(
        set(axis) == set(wanted)
        for axis, wanted in zip(zip(*chosen, strict=True), zip(*CELLS, strict=True), strict=True)
    )
    assert len(chosen) == 4

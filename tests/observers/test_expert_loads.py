"""Numbers of the load of experts against loads whose numbers are known, and the file of loads."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from ds_finetune.errors import OutputError
from ds_finetune.observers.routers import (
    MOST_BYTES,
    ExpertTable,
    TableLayout,
    busiest_rank_ratio,
    effective_experts,
    max_violations,
    num_dead_experts,
)
from ds_finetune.runs.metrics import read_expert_table
from tests.running import files_of_at_most

EVEN, SKEWED, ONE = [5, 5, 5, 5], [8, 4, 4, 0], [0, 16, 0, 0]
LOADS = np.array([EVEN, SKEWED, ONE])


def test_max_violation_is_the_excess_of_the_busiest_expert() -> None:
    assert max_violations(LOADS).tolist() == [0.0, 1.0, 3.0]


def test_effective_experts_are_those_of_the_entropy() -> None:
    skewed = math.exp(0.5 * math.log(2) + 2 * 0.25 * math.log(4))
    assert effective_experts(LOADS).tolist() == pytest.approx([4.0, skewed, 1.0], rel=1e-12)


def test_experts_without_tokens_are_dead() -> None:
    assert num_dead_experts(LOADS) == 0 + 1 + 3


def test_the_busiest_rank_holds_neighbours() -> None:
    """Of two ranks the first has 10 of 20, 12 of 16 and 16 of 16 choices: 1, 1.5 and 2 times the mean."""
    assert busiest_rank_ratio(LOADS, 2) == 1.5
    assert busiest_rank_ratio(LOADS, 1) == 1.0
    assert busiest_rank_ratio(LOADS, 4) == pytest.approx(np.mean([1.0, 2.0, 4.0]))


def test_a_step_without_tokens_has_zeros() -> None:
    none = np.zeros((2, 4), dtype=np.int64)
    assert [max_violations(none).tolist(), effective_experts(none).tolist()] == [[0.0, 0.0]] * 2
    assert (num_dead_experts(none), busiest_rank_ratio(none, 2)) == (0, 0.0)


LAYOUT = TableLayout((1, 2, 5), experts=4)


def filled(path: Path, steps: range, *, after_step: int = 0) -> ExpertTable:
    table = ExpertTable(path, LAYOUT, after_step=after_step)
    for step in steps:
        table.append(step, 7 * step, entropy=np.full(3, step / 4), counts=LOADS + step)
    return table


def check(path: Path, steps: list[int]) -> None:
    layers, records = read_expert_table(path)
    assert layers == [1, 2, 5]
    assert records["step"].tolist() == steps
    for record in records:
        assert record["num_tokens"] == 7 * record["step"]
        assert (record["entropy"] == record["step"] / 4).all()
        assert (record["counts"] == LOADS + record["step"]).all()


def test_the_table_is_read_while_it_is_written(tmp_path: Path) -> None:
    table = filled(tmp_path / "experts.bin", range(1, 6))
    check(tmp_path / "experts.bin", [1, 2, 3, 4, 5])
    table.close()
    size = len(LAYOUT.header) + 5 * (8 + 8 + 3 * 4 + 3 * 4 * 4)
    assert (tmp_path / "experts.bin").stat().st_size == size
    assert json.loads((tmp_path / "experts.bin").read_bytes().splitlines()[0])["layers"] == [1, 2, 5]


@pytest.mark.parametrize("torn", [0, 1, 40, 75])
def test_a_resumed_run_removes_what_it_does_again(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "experts.bin"
    filled(path, range(2, 9, 2)).close()
    with path.open("ab") as file:
        file.write(b"x" * torn)
    check(path, [2, 4, 6, 8])
    filled(path, range(6, 9, 2), after_step=5).close()
    check(path, [2, 4, 6, 8])
    filled(path, range(10, 11), after_step=9).close()
    check(path, [2, 4, 6, 8, 10])
    filled(path, range(1, 3)).close()
    check(path, [1, 2])


def test_a_torn_first_line_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "experts.bin"
    path.write_bytes(LAYOUT.header[:-3])
    filled(path, range(4, 5), after_step=3).close()
    check(path, [4])


def test_the_table_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "experts.bin"
    filled(path, range(1, 4)).close()
    with pytest.raises(
        OutputError, match=r"experts\.bin begins with .*\[1, 2, 5\].*, and this run's table with"
    ) as caught:
        ExpertTable(path, TableLayout((1, 2), experts=4), after_step=3)
    assert caught.value.hint
    check(path, [1, 2, 3])


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "experts.bin"
    table = filled(path, range(1, 3))
    full = path.stat().st_size
    with files_of_at_most(full + 20), pytest.raises(OSError, match="File too large"):
        table.append(3, 1, entropy=np.zeros(3), counts=LOADS)
    assert path.stat().st_size == full
    check(path, [1, 2])


def test_a_disk_that_is_full_at_the_start_does_not_end_the_run(tmp_path: Path) -> None:
    path = tmp_path / "experts.bin"
    with files_of_at_most(20):
        table = ExpertTable(path, LAYOUT, after_step=0)
        with pytest.raises(OSError, match="File too large"):
            table.append(1, 1, entropy=np.zeros(3), counts=LOADS)
    assert path.stat().st_size == 0
    table.close()
    filled(path, range(4, 6), after_step=3).close()
    check(path, [4, 5])
    with files_of_at_most(20):
        table = ExpertTable(path, LAYOUT, after_step=0)
    table.append(1, 7, entropy=np.full(3, 0.25), counts=LOADS + 1)
    table.close()
    check(path, [1])


def test_the_table_of_a_long_run_is_bounded() -> None:
    v3 = TableLayout(tuple(range(3, 61)), experts=256)
    assert v3.record.itemsize == 8 + 8 + 58 * 4 + 58 * 256 * 4
    for steps, wanted in ((1, 1), (1000, 1), (100_000, 89)):
        assert v3.steps_between(steps) == wanted
        assert -(-steps // wanted) * v3.record.itemsize <= MOST_BYTES
    assert LAYOUT.steps_between(800_000) == 1

"""Numbers of the load of experts against loads whose numbers are known, and the file of loads."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from ds_finetune.observers.routers import (
    MOST_BYTES,
    ExpertLoadsFile,
    busiest_rank_ratio,
    effective_experts,
    max_violations,
    num_dead_experts,
)
from ds_finetune.runs.metrics import read_expert_table

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


def test_the_file_of_a_long_run_is_bounded(tmp_path: Path) -> None:
    """A load has at most seven digits and a comma."""
    layers = tuple(range(3, 61))
    most = len(json.dumps([[9_999_999] * 256] * 58, separators=(",", ":")))
    for steps, wanted in ((1, 1), (500, 1), (100_000, 178)):
        file = ExpertLoadsFile(tmp_path / "experts.jsonl", layers, 256, steps=steps, say=print)
        assert file.every == wanted
        assert -(-steps // wanted) * most <= MOST_BYTES * 1.01
    assert ExpertLoadsFile(tmp_path / "experts.jsonl", (1, 2), 4, steps=800_000, say=print).every == 1


def test_lines_of_two_models_are_no_table(tmp_path: Path) -> None:
    path = tmp_path / "experts.jsonl"
    line = {"step": 1, "num_tokens": 4, "layers": [1], "entropy": [0.5], "counts": [[4, 0]]}
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"counts": [[4, 0, 0]]}) + "\n")
    with pytest.raises(ValueError, match="inhomogeneous"):
        read_expert_table(path)

"""One reward of several, beside the same in a plain loop."""

from statistics import mean, stdev
from typing import Literal

import numpy as np
import pytest

from ds_finetune.objectives.grpo import advantages, combine_rewards, has_spread

NAN = float("nan")
PARTS = np.array([[1.0, 0.1], [0.0, 0.1], [0.0, 0.1], [1.0, NAN], [NAN, 0.5], [0.0, 0.7]])
WEIGHTS = np.array([2.0, -0.5])


def test_the_weighted_sum() -> None:
    total = combine_rewards(PARTS, WEIGHTS, "sum")
    assert total.tolist() == [2 - 0.05, -0.05, -0.05, 2, -0.25, -0.35]
    nothing = combine_rewards(np.full((2, 2), NAN), WEIGHTS, "sum")
    assert np.isnan(nothing).all()


def test_each_reward_is_normalised_in_its_group() -> None:
    for rows in (range(3), range(3, 6)):
        total = combine_rewards(PARTS[rows], WEIGHTS, "each")
        expected = dict.fromkeys(rows, 0.0)
        for weight, column in zip(WEIGHTS, PARTS.T, strict=True):
            values = [column[row] for row in rows if column[row] == column[row]]
            for row in rows:
                if column[row] == column[row] and max(values) > min(values):
                    expected[row] += weight * (column[row] - mean(values)) / stdev(values)
        assert total.tolist() == pytest.approx(list(expected.values()), rel=1e-12)


@pytest.mark.parametrize("value", [0.1, 0.35, 1 / 3, 0.7, 1e9 + 0.1])
@pytest.mark.parametrize("size", [2, 8, 16])
def test_equal_rewards_count_as_nothing(value: float, size: int) -> None:
    parts = np.full((size, 1), value)
    assert combine_rewards(parts, np.ones(1), "each").tolist() == [0] * size
    assert len(set(combine_rewards(parts, np.full(1, 0.3), "sum").tolist())) == 1


@pytest.mark.parametrize("how", ["sum", "each"])
def test_rewards_that_cancel_each_other_leave_no_advantage(how: Literal["sum", "each"]) -> None:
    """Their rounding, over its own standard deviation, would be an advantage of -2.3."""
    right = np.array([0.1, 0.0, 0.1, 0.5, 0.1, 0.0, 0.1])
    parts = {"sum": np.stack([right, right + 0.3, np.full(7, 0.3)], 1), "each": np.stack([right, right - 1e6], 1)}[how]
    total = combine_rewards(parts, np.array([1.0, -1.0, 1.0][: parts.shape[1]]), how)
    assert not advantages(total[None], "mean_std").any()
    differs = combine_rewards(parts * [1 + 1e-6, *[1] * (parts.shape[1] - 1)], np.ones(parts.shape[1]), how)
    assert has_spread(differs[None]).all()

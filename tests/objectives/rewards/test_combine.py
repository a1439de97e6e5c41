"""One reward of several, beside the same in a plain loop."""

from statistics import mean, stdev

import numpy as np
import pytest

from ds_finetune.objectives.rewards.combine import combine_rewards

NAN = float("nan")
GROUPS = np.array([0, 0, 0, 5, 5, 5])
PARTS = np.array([[1.0, 0.1], [0.0, 0.1], [0.0, 0.1], [1.0, NAN], [NAN, 0.5], [0.0, 0.7]])
WEIGHTS = np.array([2.0, -0.5])


def test_the_weighted_sum() -> None:
    total = combine_rewards(PARTS, WEIGHTS, GROUPS, "sum")
    assert total.tolist() == [2 - 0.05, -0.05, -0.05, 2, -0.25, -0.35]
    nothing = combine_rewards(np.full((2, 2), NAN), WEIGHTS, np.zeros(2, dtype=np.int64), "sum")
    assert np.isnan(nothing).all()


def test_each_reward_is_normalised_in_its_group() -> None:
    total = combine_rewards(PARTS, WEIGHTS, GROUPS, "each")
    for rows in (range(3), range(3, 6)):
        expected = dict.fromkeys(rows, 0.0)
        for weight, column in zip(WEIGHTS, PARTS.T, strict=True):
            values = [column[row] for row in rows if column[row] == column[row]]
            for row in rows:
                if column[row] == column[row] and max(values) > min(values):
                    expected[row] += weight * (column[row] - mean(values)) / stdev(values)
        assert [total[row] for row in rows] == pytest.approx(list(expected.values()), rel=1e-12)


@pytest.mark.parametrize("value", [0.1, 0.35, 1 / 3, 0.7, 1e9 + 0.1])
@pytest.mark.parametrize("size", [2, 8, 16])
def test_equal_rewards_count_as_nothing(value: float, size: int) -> None:
    parts = np.full((size, 1), value)
    assert combine_rewards(parts, np.ones(1), np.zeros(size, dtype=np.int64), "each").tolist() == [0] * size
    assert len(set(combine_rewards(parts, np.full(1, 0.3), np.zeros(size, dtype=np.int64), "sum").tolist())) == 1

"""Drawing a curve with fewer points keeps every spike, dip and gap."""

import numpy as np
import pytest

from ds_finetune.runs.curves import drawn_points, smooth


def test_short_curves_keep_all_points() -> None:
    assert drawn_points(np.arange(5.0), 8).tolist() == [0, 1, 2, 3, 4]
    assert drawn_points(np.zeros(0), 8).tolist() == []


@pytest.mark.parametrize("n", [9, 100, 1_001, 100_000])
def test_spikes_dips_gaps_and_both_ends_remain(n: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(20):
        values = rng.normal(size=n)
        spike, dip, gap = rng.choice(n, 3, replace=False)
        values[spike], values[dip], values[gap] = 100.0, -100.0, np.nan
        kept = drawn_points(values, 64 if n > 64 else 8)
        assert {0, n - 1, spike, dip} <= set(kept.tolist())
        assert np.isnan(values[kept]).any()
        assert len(kept) <= (64 if n > 64 else 8)
        assert (np.diff(kept) > 0).all()


def test_what_is_never_finite_keeps_its_ends() -> None:
    values = np.full(1_000, np.nan)
    kept = drawn_points(values, 16)
    assert (kept[0], kept[-1]) == (0, 999)


def test_infinity_is_a_gap_and_hides_no_spike() -> None:
    values = np.zeros(1_000)
    values[500], values[501], values[502] = np.inf, 7.0, -np.inf
    assert {500, 501} <= set(drawn_points(values, 16).tolist())


def test_smoothing_begins_at_the_first_value_and_passes_over_gaps() -> None:
    smoothed = smooth(np.array([2.0, np.nan, 4.0]), 0.5)
    # (0.25 * 2 + 0.5 * 4) / 0.75
    assert smoothed[[0, 2]].tolist() == pytest.approx([2.0, 10 / 3])
    assert np.isnan(smoothed[1])

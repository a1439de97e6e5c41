"""Drawing a curve with fewer points keeps every spike, dip and gap."""

import numpy as np
import pytest

from ds_finetune.runs.report.charts import drawn_points, smooth


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


def test_a_smoothed_line_does_not_lag() -> None:
    falling = np.linspace(2.0, 0.44, 200)
    assert smooth(falling, 5)[5:-5] == pytest.approx(falling[5:-5])


def test_windows_are_cut_off_at_the_ends() -> None:
    smoothed = smooth(np.array([6.0, 0.0, 3.0, 9.0, 1.0]), 2)
    assert smoothed == pytest.approx([9 / 3, 18 / 4, 19 / 5, 13 / 4, 13 / 3])
    assert smooth(np.array([1.0, 5.0]), 3).tolist() == [3.0, 3.0]


def test_smoothing_passes_over_gaps_and_forgets_a_spike() -> None:
    smoothed = smooth(np.array([2.0, np.nan, 4.0, 1e25, 1.0, 0.5, 0.5]), 1)
    assert np.isnan(smoothed).tolist() == [False, True, *[False] * 5]
    assert smoothed[[0, 5, 6]].tolist() == pytest.approx([2.0, 2 / 3, 0.5])

"""The cause line: what it shows, and which hint of the table it ends with."""

import math

import pytest

from ds_finetune.trainer.rollouts.causes import CAUSES, cause_line, mean_metrics

SHARES = {
    "reward": 0.4,
    "all_right": 0.2,
    "all_wrong": 0.1,
    "no_spread": 0.3,
    "cut": 0.0,
    "unparsed": 0.0,
    "answer_tokens": 20.0,
    "entropy": 0.3,
    "mismatch": 1e-6,
    "clipped_low": 0.0,
    "clipped_high": 0.0,
}
GOOD = SHARES | {"empty": 0.0}


def test_the_line_of_a_run_that_learns_has_no_hint() -> None:
    line = cause_line("steps 1 to 10", GOOD | {"reward": 0.6}, GOOD)
    assert line == (
        "ROLLOUTS of steps 1 to 10: reward 0.600 (0.400 at the start); groups 20% all right, 10% all wrong, 70% "
        "between, 30% with equal rewards; answers 20 tokens, 0% cut, 0% unparsed; entropy 0.3 (0.3), mismatch 1e-06, "
        "0% clipped"
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"unparsed": 0.5}, "no result"),
        ({"cut": 0.4}, "max_new_tokens"),
        ({"all_wrong": 1.0, "all_right": 0.0, "no_spread": 1.0, "reward": 0.0}, "too hard"),
        ({"all_right": 0.9, "no_spread": 0.9}, "harder"),
        ({"empty": 0.5}, "no answer left to train"),
        ({"all_right": 0.0, "all_wrong": 0.0, "no_spread": 1.0}, "scores them differently"),
        ({"entropy": 0.01}, "entropy has fallen"),
        ({"mismatch": 0.2}, "disagree"),
        ({"clipped_high": 0.5}, "clipped: lower"),
        ({"reward": 0.1}, "lower than at the start"),
        ({"reward": 0.9, "answer_tokens": 4.0}, "favour wrong ones"),
    ],
)
def test_each_cause_is_named_with_what_to_change(change: dict[str, float], word: str) -> None:
    line = cause_line("step 1", GOOD | change, GOOD)
    assert word in line.partition("clipped")[2]


def test_the_first_cause_that_applies_is_named() -> None:
    line = cause_line("step 1", GOOD | {"cut": 0.9, "all_wrong": 0.9}, GOOD)
    assert CAUSES[1].hint in line
    assert "too hard" not in line


def test_shares_are_averaged() -> None:
    assert mean_metrics([SHARES, SHARES | {"reward": 0.8}]) == GOOD | {"reward": pytest.approx(0.6)}


def test_a_step_without_answers_has_no_entropy() -> None:
    nothing = {name: SHARES[name] for name in list(SHARES)[:7]}
    mean = mean_metrics([SHARES, nothing])
    assert mean == GOOD | {"empty": 0.5}
    assert "; 50% of the steps without an answer to train" in cause_line("steps 1 to 2", mean, GOOD)
    found = mean_metrics([nothing])
    assert found["empty"] == 1
    assert math.isnan(found["entropy"] + found["mismatch"] + found["clipped_low"])

"""Durations and learning rates are exact."""

import pytest

from ds_finetune.schedule import Duration, LrSchedule, warmup_steps


@pytest.mark.parametrize(
    ("text", "steps"), [("200 steps", 200), ("1 step", 1), ("3 epochs", 15), ("0.5 epochs", 3), ("1_000 tokens", 3), ("2e3 tokens", 5)]
)
def test_duration_in_steps(text: str, steps: int) -> None:
    assert Duration.parse(text).in_steps(rows=20, tokens=2000, global_batch_size=4) == steps


@pytest.mark.parametrize("text", ["", "steps", "3", "0 steps", "-1 epochs", "1.5 steps", "3 weeks"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("text", "again"),
    [("2.5 epochs", "2.5 epochs"), ("3 epochs", "3 epochs"), ("1e6 tokens", "1000000 tokens"), ("12345678 steps", "12345678 steps")],
)
def test_a_text_is_read_back(text: str, again: str) -> None:
    """Also one of a million and more, which a float is shortened from."""
    assert str(Duration.parse(str(Duration.parse(text)))) == again


def test_warmup() -> None:
    assert [warmup_steps(t, 200) for t in ("3%", "10 steps", "0", "0%")] == [6, 10, 0, 0]
    with pytest.raises(ValueError, match="is not a warm-up"):
        warmup_steps("2 epochs", 200)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.55, 0.1]),
        ("cosine", [0.5, 1.0, 0.55, 0.1]),
        ("wsd", [0.5, 1.0, 1.0, 0.1]),
    ],
)
def test_shapes_at_warmup_peak_middle_and_end(name: str, expected: list[float]) -> None:
    schedule = LrSchedule(name=name, lr=1.0, min_lr_ratio=0.1, warmup_steps=2, steps=12)  # type: ignore[arg-type]
    assert [schedule.at(step) for step in (1, 2, 7, 12)] == pytest.approx(expected)
    assert schedule.at(13) == schedule.at(12)


def test_a_run_that_is_all_warmup_does_not_divide_by_zero() -> None:
    schedule = LrSchedule(name="cosine", lr=1.0, min_lr_ratio=0.0, warmup_steps=2, steps=2)
    assert [schedule.at(1), schedule.at(2)] == [0.5, 1.0]

"""Durations and learning rates are exact."""

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_finetune.config.schedule import Duration, Interval, LrSchedule, warmup_steps
from ds_finetune.config.schema import read_config
from ds_finetune.data.batches import BatchPlan, Position, training_batches
from ds_finetune.engine.results import StepResult
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.batches import run_batches
from ds_finetune.trainer.loop import Progress, training_steps
from tests.planning import NumberedRows, prepared_run
from tests.running import tiny_task


@pytest.mark.parametrize(
    ("text", "steps"),
    [("200 steps", 200), ("1 step", 1), ("3 epochs", 15), ("0.5 epochs", 3), ("1_000 tokens", 3), ("2e3 tokens", 5)],
)
def test_duration_in_steps(text: str, steps: int) -> None:
    assert Duration.parse(text).in_steps(rows=20, tokens=2000, global_batch_size=4) == steps


@pytest.mark.parametrize("text", ["", "steps", "3", "0 steps", "-1 epochs", "1.5 steps", "3 weeks"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        Duration.parse(text)


@pytest.mark.parametrize(
    "text", ["2.5 epochs", "1000000 steps", "1234567 steps", "1e9 tokens", "0.3333333 epochs", "0.0000001 epochs"]
)
def test_a_text_is_read_back_as_the_same_number(text: str) -> None:
    """The run file is kept in this form, and read from it again."""
    duration = Duration.parse(text)
    assert Duration.parse(str(duration)) == duration
    assert str(Duration.parse("2.5 epochs")) == "2.5 epochs"


@pytest.mark.parametrize("global_batch_size", [1, 2, 4, 100])
def test_a_run_in_epochs_has_batches_for_all_of_its_steps(global_batch_size: int) -> None:
    """The last step evaluates, saves and exports: with a batch fewer none of it happened."""
    for rows, epochs in product((1, 2, 3, 5, 7, 10, 17, 1001), (0.1, 0.3, 0.5, 1, 1.5, 2.3, 3)):
        length = Duration(epochs, "epochs")
        steps = length.in_steps(rows=rows, tokens=10 * rows, global_batch_size=global_batch_size)
        plan = BatchPlan(global_batch_size, 1, 0, 1, 0, shuffle=True, pad_token_id=0, row_len=None)
        batches = training_batches(NumberedRows(rows), plan, start_step=0, total_rows=length.in_rows(rows))
        found = [len(batch.row_ids) for batch in batches]
        assert len(found) == steps, (rows, epochs)
        assert rows * epochs - 1e-6 <= sum(found) < rows * epochs + 1, (rows, epochs)


def test_the_batches_of_a_run_are_as_many_as_its_schedule_says(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path / "t", data={"workers": 1, "eval": []})
    config = read_config(run_file, ["train.for=0.29 epochs", "train.global_batch_size=9", "train.micro_batch_size=1"])
    run = prepared_run(config, make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu"))
    assert (len(run.inputs.train), run.schedule.steps) == (32, 2)
    assert [len(batch.row_ids) for batch in run_batches(run)] == [9, 1]


def test_epochs_of_prompts_are_counted_in_prompts(tmp_path: Path) -> None:
    """A step has eight answers, and uses two of the ten prompts."""
    rows = [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(10)]
    given = {"train": str(tmp_path / "t.jsonl"), "workers": 1, "eval": []}
    run_file = tiny_task(tmp_path, data=given, objective={"name": "grpo", "group_size": 4}, rewards=["number"])
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = ("train.for=3 epochs", "rollout={prompts_per_step: 2, max_new_tokens: 8}", "train.micro_batch_size=2")
    config = read_config(run_file, settings)
    run = prepared_run(config, make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu"))
    assert (config.train.global_batch_size, run.schedule.steps) == (8, 15)


def test_warmup() -> None:
    assert [warmup_steps(t, 200) for t in ("3%", "10 steps", "0", "0%")] == [6, 10, 0, 0]
    assert [warmup_steps("3%", steps) for steps in (1, 20, 34, 100, 101)] == [1, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="is not a warm-up"):
        warmup_steps("2 epochs", 200)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("500 steps", Interval(steps=500)),
        ("15 minutes", Interval(seconds=900)),
        ("1e3 steps or 2 hours", Interval(1000, 7200)),
        ("90 seconds or 20 steps", Interval(20, 90)),
        ("1 epoch", Interval(epochs=1)),
        ("0.5 epochs or 15 minutes", Interval(seconds=900, epochs=0.5)),
    ],
)
def test_an_interval_is_steps_or_a_time_or_both(text: str, interval: Interval) -> None:
    assert Interval.parse(text) == interval


@pytest.mark.parametrize(
    ("interval", "due"),
    [
        (Interval(3), [3, 6, 9]),
        (Interval(), []),
        (Interval.parse("1 epoch").in_steps(32 / 12), [3, 6, 8]),
        # A tenth as a float is more than a tenth.
        (Interval.parse("0.1 epochs").in_steps(30), [3, 6, 9]),
        # Events of one step are one.
        (Interval.parse("0.1 epochs").in_steps(4), list(range(1, 10))),
        (Interval.parse("2 epochs").in_steps(0.25), list(range(1, 10))),
    ],
)
def test_an_event_within_a_step_is_at_its_end(interval: Interval, due: list[int]) -> None:
    assert [step for step in range(1, 10) if interval.is_due(step)] == due


@pytest.mark.parametrize(
    "text",
    ["2 tokens", "5", "", "1 steps or 2 steps", "1 steps or 1 epochs", "1 hours or 2 hours", "never", "0 steps"],
)
def test_no_interval(text: str) -> None:
    with pytest.raises(ValueError, match=f"`{text}`"):
        Interval.parse(text)


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


FORMULAS = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "wsd": lambda x: 1.0 if x <= 0.9 else 10 * (1 - x),
}
"""f(x) of docs/explanation/numerical-rules.md."""


def documented_rates(name: str, *, steps: int, warmup: int) -> list[float]:
    """Rates at a peak of 2e-5. With W warm-up steps of N and the lowest share m, step s <= W trains at s / W of the
    rate, and later ones at m + (1 - m) f((s - W) / (N - W)); a run without warm-up has W = 1.
    """
    w = warmup or 1
    return [
        2e-5 * (s / w if s <= w else 0.1 + 0.9 * FORMULAS[name]((s - w) / (steps - w))) for s in range(1, steps + 1)
    ]


def schedule_of(name: str, *, steps: int, warmup: int) -> LrSchedule:
    return LrSchedule(name=name, lr=2e-5, min_lr_ratio=0.1, warmup_steps=warmup, steps=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
def test_the_rate_of_each_step_by_the_documented_formula(name: str, steps: int, warmup: int) -> None:
    schedule, expected = (make(name, steps=steps, warmup=warmup) for make in (schedule_of, documented_rates))
    assert [schedule.at(step) for step in range(1, steps + 1)] == pytest.approx(expected, rel=1e-9)
    if steps >= warmup:
        assert max(expected) == pytest.approx(2e-5), "the peak is a step of the run"


class RateRecorder:
    """Has the part of an engine that the loop calls: each step skips or takes its batch, and its rate is recorded."""

    plan = SimpleNamespace(device="cpu")

    def __init__(self) -> None:
        self.rates: list[float] = []

    def step(self, batch: SimpleNamespace, *, lr: float) -> StepResult:
        self.rates.append(lr)
        return StepResult({"loss": 1.0}, 1.0, 1, 1, batch.skipped, "")


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("longer", [7, 14])
def test_rates_after_a_resume_are_those_of_the_same_steps(name: str, warmup: int, longer: int) -> None:
    """Also where the resumed run is longer, and where a step before or after the resume is skipped."""
    expected = documented_rates(name, steps=longer, warmup=warmup)
    for done, skipped_step in product(range(8), (0, 2, 6)):
        batches = [
            SimpleNamespace(skipped=step == skipped_step, position=Position(0, 0)) for step in range(1, longer + 1)
        ]
        engine: Any = RateRecorder()
        skipped = int(0 < skipped_step <= done)
        after = Progress(done, skipped)
        schedule = schedule_of(name, steps=longer, warmup=warmup)
        records = list(training_steps(engine, batches[done:], schedule, after=after))
        taken = [step - (0 < skipped_step < step) for step in range(done + 1, longer + 1)]
        assert engine.rates == pytest.approx([expected[step - 1] for step in taken], rel=1e-9), (done, skipped_step)
        assert [record.values["optim/lr"] for record in records] == engine.rates


def test_a_run_that_is_all_warmup_does_not_divide_by_zero() -> None:
    schedule = LrSchedule(name="cosine", lr=1.0, min_lr_ratio=0.0, warmup_steps=2, steps=2)
    assert [schedule.at(1), schedule.at(2)] == [0.5, 1.0]


def test_exponential_rise_goes_from_the_first_rate_to_the_last() -> None:
    schedule = LrSchedule(name="exponential_rise", lr=0.1, min_lr_ratio=1e-4, warmup_steps=3, steps=5)
    assert [schedule.at(step) for step in range(1, 7)] == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.1])

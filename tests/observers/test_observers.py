"""What happens on steps: evaluation, best weights, patience, lines, files, utilisation."""

import importlib
import io
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ds_finetune.config.schedule import Interval
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import EvalConfig, LogConfig
from ds_finetune.config.units import GIB
from ds_finetune.data.batches import Batch, BatchPlan, MicroBatch, eval_batches
from ds_finetune.data.prepared_rows import Row
from ds_finetune.engine.results import HeldOutScores, StepResult
from ds_finetune.errors import ConfigError
from ds_finetune.objectives.objective import TokenObjective
from ds_finetune.observers.evaluation import BestAndPatience, Evaluation, matches
from ds_finetune.observers.performance import MEASURED_STEPS, MemoryCheck, Utilisation
from ds_finetune.observers.progress import EVALUATION, EXPORT, SAVE, ProgressLine, TimeLeft
from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.trackers import Trackers, check_trackers
from ds_finetune.observers.writers import MetricsFile, SampleFile
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.runs.metrics import Sample
from ds_finetune.system.world import World
from ds_finetune.trainer.loop import run_steps, step_values
from ds_finetune.trainer.observers import HeldOutEvaluation


def values(**more: float) -> dict[str, float]:
    result = StepResult(
        {"loss": 2.5, "accuracy": 0.5}, 1.25, num_tokens=1000, num_supervised_tokens=600, skipped=False, culprit=""
    )
    return (
        step_values(result, seconds=2.0, waited=0.5)
        | {
            "optim/lr": 1e-3,
            "data/tokens_seen": 1000,
            "train/skipped_steps": 0,
            "memory/peak_gib": 0.5,
            "perf/eta_seconds": 9.0,
        }
        | more
    )


def record(step: int, *, last: bool = False, **more: float) -> StepRecord:
    return StepRecord(step, values(**more), is_last=last)


def test_values_of_a_step_are_rates_over_the_whole_step() -> None:
    found = values()
    assert (
        found["perf/tokens_per_second"],
        found["perf/supervised_tokens_per_second"],
        found["perf/data_wait_seconds"],
    ) == (500, 300, 0.5)


def test_labelled_texts_are_counted_as_examples() -> None:
    result = StepResult(
        {"loss": 1.0}, 1.0, num_tokens=50, num_supervised_tokens=0, skipped=False, culprit="", num_examples=6
    )
    found = step_values(result, seconds=2.0, waited=0.5)
    assert (found["data/examples"], found["perf/examples_per_second"]) == (6, 3.0)
    assert not [name for name in found if "supervised" in name]
    pairs = step_values(replace(result, num_supervised_tokens=20), seconds=2.0, waited=0.5)
    assert pairs["data/supervised_tokens"] == 20
    assert not [name for name in pairs if "examples" in name]


def test_evaluation_comes_every_so_often_and_at_the_end() -> None:
    losses = iter([3.0, 2.0, 1.0])
    observer = Evaluation(
        Interval(2),
        lambda: {"eval": HeldOutScores({"loss": next(losses), "accuracy": 0.5}, {"supervised_tokens": 10})},
        lambda: {"eval": 0.25},
    )
    found = [observer.after_step(record(step, last=step == 5)) for step in range(1, 6)]
    assert [r.values.get("eval/loss") for r in found] == [None, 3.0, None, 2.0, 1.0]
    assert found[1].values["eval/perplexity"] == pytest.approx(math.exp(3))
    assert found[1].values["eval/exact_match"] == 0.25
    assert "train/loss" in found[1].values


def test_named_sets_have_metrics_and_lines_of_their_own() -> None:
    scores = {
        "eval": HeldOutScores({"loss": 2.0, "accuracy": 0.5}, {"supervised_tokens": 30}),
        "eval/new": HeldOutScores({"loss": 3.0, "accuracy": 0.25}, {"supervised_tokens": 10}),
    }
    found = Evaluation(Interval(1), lambda: scores, lambda: {"eval": 0.5, "eval/new": 1.0}).after_step(
        record(1, last=True)
    )
    added = {name: value for name, value in found.values.items() if name.startswith("eval/")}
    assert added == {
        "eval/loss": 2.0,
        "eval/accuracy": 0.5,
        "eval/perplexity": math.exp(2),
        "eval/exact_match": 0.5,
        "eval/new/loss": 3.0,
        "eval/new/accuracy": 0.25,
        "eval/new/perplexity": math.exp(3),
        "eval/new/exact_match": 1.0,
    }
    out = io.StringIO()
    ProgressLine(steps=1, section=LogConfig(seconds=0), out=out).after_step(
        found.with_values({"perf/eta_seconds": 0.0})
    )
    evaluation = "evaluation after step 1  loss 2.0000  accuracy 0.5000  exact_match 0.5000  new/loss 3.0000"
    assert out.getvalue().splitlines()[1:] == [evaluation]


def test_evaluation_without_an_interval_comes_only_at_the_end() -> None:
    scores = {"eval": HeldOutScores({"loss": 1000.0, "accuracy": 0.0}, {"supervised_tokens": 10})}
    observer = Evaluation(Interval(), lambda: scores)
    found = [observer.after_step(record(step, last=step == 3)) for step in range(1, 4)]
    assert ["eval/loss" in r.values for r in found] == [False, False, True]
    assert math.isfinite(found[-1].values["eval/perplexity"])
    assert "eval/exact_match" not in found[-1].values


def test_best_is_kept_and_patience_ends_the_run() -> None:
    kept: list[int] = []
    observer = BestAndPatience(EvalConfig(patience=2), kept.append)
    found = [
        observer.after_step(record(step, **{"eval/loss": loss}))
        for step, loss in enumerate([3.0, 2.0, 2.5, 2.1], start=1)
    ]
    assert kept == [1, 2]
    assert [bool(r.stop) for r in found] == [False, False, False, True]
    assert found[-1].stop == "eval/loss has not fallen below 2.0000 of step 2 for 2 evaluations"
    assert found[-1].best_step == 2
    assert observer.after_step(record(5)).stop == ""


def test_a_nan_is_never_the_best() -> None:
    kept: list[int] = []
    observer = BestAndPatience(EvalConfig(), kept.append)
    observer.after_step(record(1, **{"eval/loss": math.nan}))
    assert kept == []


def test_the_loop_stops_where_an_observer_says_so() -> None:
    class Stopper:
        def after_step(self, record: StepRecord) -> StepRecord:
            return record.stopping("enough") if record.step == 2 else record

        def close(self) -> None: ...

    drawn: list[int] = []

    def steps() -> object:
        for step in range(1, 9):
            drawn.append(step)
            yield record(step)

    last = run_steps(steps(), [Stopper()])  # type: ignore[arg-type]
    assert (last.step, last.stop, drawn) == (2, "enough", [1, 2])  # type: ignore[union-attr]
    assert run_steps([], []) is None


def test_metrics_file_is_json_also_for_nan(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", pytest.fail)
    file.after_step(record(1))
    file.after_step(StepRecord(2, values(**{"train/grad_norm": math.inf}), notice="w on rank 0"))
    file.after_step(StepRecord(3, values(), slow="rank 1 2.0x the median"))
    file.close()
    first, second, third = (
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert (first["step"], first["train/loss"]) == (1, 2.5)
    assert (second["train/grad_norm"], second["non_finite"], second["notice"]) == (
        None,
        ["train/grad_norm"],
        "w on rank 0",
    )
    assert third["slow"] == "rank 1 2.0x the median"


def test_progress_lines_elsewhere_than_on_a_terminal() -> None:
    out = io.StringIO()
    line = ProgressLine(steps=10, section=LogConfig(every=4, seconds=0), steps_per_epoch=16, out=out)
    for step in range(1, 9):
        line.after_step(StepRecord(step, values(**{"perf/mfu": 0.4}), notice="w on rank 1" if step == 3 else ""))
    line.after_step(record(9, **{"eval/loss": 1.5, "eval/accuracy": 0.5}))
    line.close()
    lines = out.getvalue().splitlines()
    assert [text.split("  ")[0] for text in lines] == [
        *(f"step {step}/10" for step in (3, 4, 8, 9)),
        "evaluation after step 9",
    ]
    assert lines[0].endswith("SKIPPED: w on rank 1")
    for part in ("loss 2.5000", "grad_norm 1.25", "lr 0.001", "2 s/step", "500 tokens/s", "mfu 40.0%", "GiB", "eta "):
        assert part in lines[1]
    assert "epoch 0.25  eta 9 s  loss" in lines[1]
    assert lines[4] == "evaluation after step 9  loss 1.5000  accuracy 0.5000"


def test_a_step_that_waits_for_its_batch_says_so() -> None:
    """More than a quarter of a step that takes two seconds."""
    out = io.StringIO()
    line = ProgressLine(steps=3, section=LogConfig(seconds=0), steps_per_epoch=16, out=out)
    for step, seconds in ((1, 0.5), (2, 0.9)):
        line.after_step(StepRecord(step, values(**{"perf/data_wait_seconds": seconds})))
    assert ["(45% waiting for a batch)" in text for text in out.getvalue().splitlines()] == [False, True]


def test_a_step_from_which_nothing_is_learned_says_so() -> None:
    out = io.StringIO()
    line = ProgressLine(steps=3, section=LogConfig(seconds=0), steps_per_epoch=16, out=out)
    for step, notice in ((1, ""), (2, "w on rank 1")):
        line.after_step(StepRecord(step, values(**{"train/grad_norm": 0.0}), notice=notice))
    line.after_step(record(3))
    assert ["NOTHING LEARNED" in text for text in out.getvalue().splitlines()] == [True, False, False]


def test_lines_on_standard_output_keep_their_distance_and_the_log_has_all() -> None:
    out, log = io.StringIO(), list[str]()
    section = LogConfig(every=2, seconds=3600)
    line = ProgressLine(steps=10, section=section, out=out, log=log.append)
    for step in range(1, 11):
        numbers = {"eval/loss": 1.5} if step in (5, 9) else {}
        line.after_step(replace(record(step, **numbers), is_last=step == 10, best_step=5))
    lines = out.getvalue().splitlines()
    steps = [text for text in lines if text.startswith("step ")]
    assert [text.split()[1] for text in steps] == ["2/10", "5/10", "9/10", "10/10"]
    assert [text for text in lines if text not in steps] == [
        "evaluation after step 5  loss 1.5000  best so far",
        "evaluation after step 9  loss 1.5000  best is step 5",
    ]
    assert [text.split()[1] for text in log] == ["2/10", "4/10", "5/10", "6/10", "8/10", "9/10", "10/10"]


def test_the_time_left_holds_evaluations_and_saves_but_no_export_at_the_end() -> None:
    left = TimeLeft(10, {EVALUATION: Interval(4), SAVE: Interval()}, evaluation_steps=0.5)
    left.after_step(record(1, **{"perf/step_seconds": 2.0}))
    # 9 steps, and evaluations at 4, 8 and 10.
    assert left.seconds(1) == pytest.approx(9 * 2 + 3 * 1)
    left._measured = {EVALUATION: [6.0, 8.0], SAVE: [3.0], EXPORT: [20.0]}
    # An evaluation takes 7 s, and every second one exports its best weights for 20 s.
    assert left.seconds(8) == pytest.approx(2 * 2 + 1 * (7 + 10) + 3)
    assert left.seconds(10) == 0
    assert TimeLeft(10, {}).seconds(3) == 0


def test_the_time_left_measures_what_it_is_given() -> None:
    left = TimeLeft(2, {EVALUATION: Interval(1)})
    assert left.during(EVALUATION)(lambda: time.sleep(0.05) or 7)() == 7
    assert 0.05 <= left.seconds(1) < 60


def test_an_evaluation_reads_the_first_rows_of_its_limit() -> None:
    rows = [Row(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), 3)] * 10
    plan = BatchPlan(
        global_batch_size=4, micro_batch_size=2, rank=0, dp=1, seed=0, shuffle=True, pad_token_id=0, row_len=None
    )
    read = [batch.row_ids for batch in eval_batches(rows, plan, limit=5)]
    assert read == [(0, 1), (2, 3), (4,)]
    assert sum(len(batch.row_ids) for batch in eval_batches(rows, plan)) == 10


def test_a_runs_evaluation_takes_the_limit() -> None:
    config = RunConfig.model_validate(
        {
            "model": "m",
            "data": {"train": "a", "eval": "b", "packing": False, "balance": False},
            "eval": {"limit": 3},
            "output_dir": "o",
            "train": {"micro_batch_size": 2},
        }
    )
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "python"), device="cpu")
    rows = [Row(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), 3)] * 10
    asked: list[bool] = []

    def evaluated(
        batches: Iterable[Batch], *, baseline: Iterable[MicroBatch], is_over: Callable[[], bool]
    ) -> list[tuple[int, ...]]:
        return [batch.row_ids for batch in batches if not is_over()]

    engine = SimpleNamespace(plan=plan, is_rank_zero=True, evaluate=evaluated, objective=TokenObjective("sft"))
    model = SimpleNamespace(objective=TokenObjective("sft"), mtp=None, hf_config=SimpleNamespace(model_type="llama"))
    inputs = SimpleNamespace(
        train=rows,
        held_out={"eval": rows},
        stop_ids=[],
        pad_token_id=0,
    )
    evaluation = HeldOutEvaluation(
        SimpleNamespace(config=config, plan=plan, model=model, inputs=inputs, reference={}),
        engine,
        SimpleNamespace(is_stop_requested=lambda: bool(asked.append(True))),
    )  # type: ignore[arg-type]
    assert evaluation.scores() == {"eval": [(0, 1), (2,)]}
    assert asked == [True, True], "each batch asks whether the run is to end"


def test_answers_are_written_with_the_step_of_their_evaluation(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "samples.jsonl", pytest.fail)
    file.after_step(record(1))
    file.collect([Sample(0, "eval", "1 + 1 =", "3", "2"), Sample(0, "eval/new", "a", "b", "b")])
    file.after_step(record(2))
    file.after_step(record(3))
    file.close()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 2, "name": "eval", "prompt": "1 + 1 =", "answer": "3", "expected": "2"},
        {"step": 2, "name": "eval/new", "prompt": "a", "answer": "b", "expected": "b"},
    ]


def test_progress_stays_in_place_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    line = ProgressLine(steps=2, section=LogConfig(seconds=0), out=out)
    line.after_step(record(1))
    line.after_step(record(2, last=True))
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().startswith("\r")
    lines = out.getvalue().split("\r\x1b[2K")[1:]
    assert len(lines[0]) == 39, "a longer line would be wrapped, and the next one could not replace it"
    assert lines[1].endswith(" GiB\n")


def test_the_line_of_pairs_has_accuracy_and_margin_and_the_last_one_no_time_left() -> None:
    out = io.StringIO()
    left = TimeLeft(2, {})
    line = ProgressLine(steps=2, section=LogConfig(seconds=0), out=out)
    pairs = {"train/reward_accuracy": 0.75, "train/reward_margin": 1.5, "train/logp_chosen": -9.0}
    assert left.after_step(record(1)).values["perf/eta_seconds"] == left.seconds(1) == pytest.approx(2.0)
    line.after_step(left.after_step(record(1, **pairs)))
    line.after_step(left.after_step(record(2, last=True, **pairs)))
    first, last = out.getvalue().splitlines()
    assert first.endswith("train/reward_accuracy 0.7500  train/reward_margin 1.5000")
    assert ("  eta " in first, "  eta " in last) == (True, False)


def test_utilisation_is_model_flops_over_the_peak_of_all_ranks() -> None:
    found = Utilisation(flops_per_token=6e9, peak_flops=1e12, world_size=2).after_step(record(1))
    assert found.values["perf/mfu"] == pytest.approx(500 * 6e9 / 2e12)


def test_exact_match_ignores_outer_white_space_alone() -> None:
    assert matches(["a ", "b", "c d"], ["a", "B", "c d"]) == pytest.approx(2 / 3)
    assert matches([], []) == 0


def test_trackers_by_name(tmp_path: Path) -> None:
    check_trackers(["tensorboard"])
    trackers = Trackers(["tensorboard"], tmp_path, {"lr": 1e-3}, pytest.fail)
    trackers.after_step(record(1, **{"train/grad_norm": math.nan}))
    trackers.close()
    assert list((tmp_path / "tensorboard").rglob("events*"))
    with pytest.raises(ConfigError, match=r"log\.trackers names `tensorbord`") as caught:
        check_trackers(["tensorbord"])
    assert "tensorboard" in caught.value.hint


PACKAGES = {
    "aim": "aim",
    "clearml": "clearml",
    "comet_ml": "comet-ml",
    "dvclive": "dvclive",
    "mlflow": "'ds_finetune[track]'",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "'ds_finetune[track]'",
}
"""What pip installs for each tracker, by accelerate's name of the tracker."""


@pytest.mark.parametrize("name", PACKAGES)
def test_each_tracker_is_taken_by_name_where_its_package_is_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = importlib.import_module("accelerate.tracking")
    assert set(PACKAGES) == set(tracking.LOGGER_TYPE_TO_CLASS)
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(ConfigError, match=f"log.trackers names `{name}`, whose package is not installed") as caught:
        check_trackers([name])
    assert f"pip install {PACKAGES[name]}" in caught.value.hint
    monkeypatch.setattr(tracking, "_available_trackers", [name])
    check_trackers([name])


def test_memory_is_compared_once_with_what_was_measured() -> None:
    said: list[str] = []
    check = MemoryCheck(3 * GIB, lambda: GIB, lambda peak: 2 * peak, said.append)
    found = [check.after_step(record(step)) for step in range(1, MEASURED_STEPS + 3)]
    names = ("memory/predicted_gib", "memory/measured_gib")
    assert [one.step for one in found if names[0] in one.values] == [MEASURED_STEPS]
    assert [found[MEASURED_STEPS - 1].values[name] for name in names] == [3, 2]
    assert said == ["after 20 steps: memory of the fullest rank 3.000 GiB predicted, 2.000 GiB measured (+50%)"]


def test_growth_of_a_cpu_process_is_not_compared_with_its_tensors() -> None:
    said: list[str] = []
    check = MemoryCheck(3 * GIB, lambda: 4 * GIB, lambda peak: peak, said.append, is_host=True)
    for step in range(1, MEASURED_STEPS + 1):
        check.after_step(record(step))
    grown = "its process grew by 4.000 GiB, with libraries and freed memory that it keeps"
    assert said == [f"after 20 steps: memory of the fullest rank 3.000 GiB predicted for tensors; {grown}"]


def test_what_is_not_predicted_is_not_compared() -> None:
    said: list[str] = []
    check = MemoryCheck(None, lambda: GIB, lambda peak: peak, said.append)
    found = [check.after_step(record(step)) for step in range(1, MEASURED_STEPS + 1)]
    assert not said
    assert found[-1].values["memory/measured_gib"] == 1
    assert "memory/predicted_gib" not in found[-1].values

"""What observers make of the loads of experts: metrics, the drift of biases, the table and one warning."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_finetune.config.schema import RunConfig
from ds_finetune.model.routers import RouterChoices
from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.routers import (
    ExpertLoadsFile,
    LoadWatch,
    RouterMetrics,
    load_advice,
)
from ds_finetune.runs.metrics import read_expert_table
from tests.running import files_of_at_most

EVEN, SKEWED = [[40, 40, 40, 40], [40, 40, 40, 40]], [[80, 40, 40, 0], [40, 40, 40, 40]]
COLLAPSED = [[160, 0, 0, 0], [0, 0, 0, 160]]


def record(step: int, counts: list[list[int]], *, skipped: bool = False) -> StepRecord:
    choices = RouterChoices((1, 2), torch.tensor(counts), torch.tensor([1.0, 0.5], dtype=torch.float64), 80)
    return StepRecord(step, {"train/skipped": float(skipped)}, counted={"routers": choices})


def test_metrics_of_a_step() -> None:
    found = RouterMetrics(ep=2, bias_update=0).after_step(record(1, SKEWED))
    skewed = math.exp(0.5 * math.log(2) + 2 * 0.25 * math.log(4))
    assert found.values == {
        "train/skipped": 0.0,
        "router/max_violation_mean": 0.5,
        "router/max_violation_max": 1.0,
        "router/dead_experts": 1.0,
        "router/effective_experts_mean": pytest.approx((4 + skewed) / 2),
        "router/effective_experts_min": pytest.approx(skewed),
        "router/entropy": 0.75,
        "router/busiest_rank_ratio": 1.25,
    }
    sampled = RouterChoices((1, 2), torch.tensor(SKEWED), torch.zeros(2, dtype=torch.float64), 80, mismatch=0.25)
    other = StepRecord(1, {"train/skipped": 0.0}, counted={"routers": sampled})
    assert RouterMetrics(ep=1, bias_update=0).after_step(other).values["router/mismatch"] == 0.25
    alone = RouterMetrics(ep=1, bias_update=0).after_step(record(1, SKEWED))
    assert found.values.keys() - alone.values.keys() == {"router/busiest_rank_ratio"}


def test_a_model_without_routers_has_no_such_metrics() -> None:
    plain = StepRecord(1, {"train/skipped": 0.0})
    watch = LoadWatch(10, "", pytest.fail)
    assert watch.after_step(RouterMetrics(ep=1, bias_update=0.1).after_step(plain)) is plain


def test_biases_drift_by_the_steps_that_were_applied() -> None:
    """The first expert is lowered, the last one raised, and those with the mean load stay."""
    metrics, drifts = RouterMetrics(ep=1, bias_update=0.5), []
    steps = [(SKEWED, False), (SKEWED, True), (SKEWED, False), ([[0, 40, 40, 80], [40, 40, 40, 40]], False)]
    for step, (counts, skipped) in enumerate(steps, start=1):
        if step == 3:
            resumed = RouterMetrics(ep=1, bias_update=0.5)
            resumed.restore(metrics.state())
            metrics = resumed
        values = metrics.after_step(record(step, counts, skipped=skipped)).values
        drifts.append((values["router/bias_drift_mean"], values["router/bias_drift_max"]))
    assert drifts == [(1 / 8, 0.5), (1 / 8, 0.5), (2 / 8, 1.0), (1 / 8, 0.5)]


def test_biases_drift_by_the_rate_of_each_step() -> None:
    """The rate may change where a run resumes; at 0 biases stay where they are."""
    state, drifts = RouterMetrics(ep=1, bias_update=0).state(), []
    for step, rate in enumerate((0.0, 0.5, 0.25, 0.0), start=1):
        metrics = RouterMetrics(ep=1, bias_update=rate)
        metrics.restore(state)
        drifts.append(metrics.after_step(record(step, SKEWED)).values.get("router/bias_drift_max"))
        state = metrics.state()
    assert drifts == [None, 0.5, 0.75, 0.75]


def test_the_table_has_the_steps_whose_turn_it_is(tmp_path: Path) -> None:
    path, said = tmp_path / "experts.jsonl", list[str]()
    writer = ExpertLoadsFile(path, (1, 2), 4, steps=8, say=said.append)
    writer.every = 2
    for step in range(1, 4):
        writer.after_step(record(step, SKEWED))
    with files_of_at_most(path.stat().st_size + 10):
        writer.after_step(record(4, EVEN))
    writer.after_step(record(6, COLLAPSED))
    writer.after_step(StepRecord(8, {}))
    writer.close()
    layers, table = read_expert_table(path)
    assert (layers, table["step"].tolist()) == ([1, 2], [2, 4, 6])
    assert table["counts"].tolist() == [SKEWED, EVEN, COLLAPSED]
    assert np.array_equal(table["entropy"], [[1.0, 0.5]] * 3)
    assert [text.split(":")[0] for text in said] == [
        f"{path} CANNOT BE WRITTEN",
        f"{path} is written again, with 1 records that had waited",
    ]


def test_uneven_loads_are_said_once() -> None:
    said: list[str] = []
    watch = LoadWatch(40, "set router.balance", said.append)
    for step, counts in enumerate([EVEN] * 8 + [COLLAPSED] * 12, start=1):
        if step == 7:
            resumed = LoadWatch(40, "set router.balance", said.append)
            resumed.restore(watch.state())
            watch = resumed
        watch.after_step(record(step, counts))
    assert said == [
        "EXPERTS: 6 of 8 had no token in steps 11 to 14, and the busiest of a layer had 4.0 times the mean load "
        "(at the beginning 0 and 1.0 times); set router.balance"
    ]
    again = LoadWatch(40, "", pytest.fail)
    again.restore(watch.state())
    for step in range(21, 40):
        again.after_step(record(step, COLLAPSED))


def test_even_loads_and_few_tokens_are_not_worth_a_line() -> None:
    """The same steps with many tokens on one expert are worth one."""
    said: list[str] = []
    for counts, lines in ((EVEN, 0), ([[1, 0, 0, 0], [0, 0, 0, 1]], 0), (COLLAPSED, 1)):
        said.clear()
        watch = LoadWatch(10, "", said.append)
        for step in range(1, 11):
            watch.after_step(record(step, counts))
        assert len(said) == lines, said


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, "set router.balance (0.0001)"),
        ({"router": {"bias_update": 0.001}}, "set router.balance (0.0001)"),
        ({"router": {"balance": 0.01}}, "raise router.balance (0.01)"),
        ({"router": {"train": False}}, "routers are frozen"),
        ({"lora": {"rank": 4}}, "other data, fewer steps or a lower optim.lr"),
    ],
)
def test_advice_follows_the_run_file(sections: dict[str, object], said: str) -> None:
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "output_dir": "o", **sections})
    assert load_advice(config.lora, config.router).startswith(said)

"""Classification, regression and reward models take the steps of a plain loop over unpadded documents, in every layout
and for every division of a batch that no number of ranks divides.
"""

import itertools
from collections.abc import Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finetune.objectives.scores import Regression
from ds_finetune.plan.mesh import TESTED_LAYOUTS
from ds_finetune.reference.selftest.cells import hf_config
from tests.pairwise import each_value, pairwise
from tests.parity.four_bit import HAS_FOUR_BIT, write_wide
from tests.parity.reference import GRADIENT_TOLERANCE, LOSS_TOLERANCE, ids_of, launch, relative
from tests.parity.scoring import OBJECTIVES, ScoreCell, examples, plain_steps, save_base

FAMILIES = ("deepseek_v3_deep", "qwen2", "llama")
"""A model with enough layers for stages of which each has experts, one with a tied embedding, and a plain one."""
AXES = ("", *("+".join(sorted(row.axes)) for row in TESTED_LAYOUTS if row.axes))
Run = tuple[ScoreCell, int]


def _is_run(cell: ScoreCell, world: int) -> bool:
    """Whether a cell is one that may be trained, on so many ranks."""
    if not cell.axes:
        return world < 4
    is_tested = any(row.axes == set(cell.axes) and cell.stage in row.stages for row in TESTED_LAYOUTS)
    has_experts = cell.family.startswith("deepseek")
    return is_tested and world == 2 ** len(cell.axes) and (has_experts or "ep" not in cell.axes)


ALL: list[Run] = [
    (cell, world)
    for values in itertools.product(OBJECTIVES, FAMILIES, range(4), (1, 2), (False, True), AXES, (False, True))
    for cell in [ScoreCell(*values)]
    for world in (1, 2, 3, 4)
    if _is_run(cell, world)
] + [
    (ScoreCell(objective, "llama", stage, accumulation, packing, has_lora=True, quantize="nf4"), world)
    for objective, stage, accumulation, packing, world in itertools.product(
        OBJECTIVES, range(4), (1, 2), (False, True), (1, 2, 3)
    )
    if HAS_FOUR_BIT
]
ALL += [
    (ScoreCell(objective, "deepseek_v3_deep", stage, 2, packing, "pp", vpp=2), 2)
    for objective, stage, packing in itertools.product(OBJECTIVES, (0, 1), (False, True))
]


def _axes(run: Run) -> tuple[Hashable, ...]:
    return (*asdict(run[0]).values(), run[1])


CHOSEN = each_value([run for run in ALL if run[1] < 4 and run[0].vpp == 1], _axes)
"""Every value of every axis on up to three ranks; every pair of values is behind the marker."""
REST = [run for run in pairwise(ALL, _axes) if run not in CHOSEN]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for family in FAMILIES:
        save_base(hf_config(family), folder / family)
    write_wide(folder)
    return folder


@pytest.fixture(scope="session")
def results(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch("score_worker.py", CHOSEN, bases, tmp_path_factory.mktemp("scores"))


@pytest.fixture(scope="session")
def rest(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch("score_worker.py", REST, bases, tmp_path_factory.mktemp("scores-rest"))


def _check(run: Run, results: Path, bases: Path) -> None:
    cell, world = run
    result = torch.load(results / f"{cell.name}-world={world}.pt", weights_only=True)
    head = result["head"]["score.weight"]
    rows = tuple(map(tuple, head.tolist()))
    wanted = plain_steps(bases / cell.twin, cell.objective, cell.has_lora, rows, family=cell.family)
    losses = [step["metrics"]["loss"] for step in result["steps"]]
    assert losses[0] == pytest.approx(wanted["losses"][0], abs=LOSS_TOLERANCE)
    assert losses == pytest.approx(wanted["losses"], rel=GRADIENT_TOLERANCE)
    assert [step["norm"] for step in result["steps"]] == pytest.approx(wanted["norms"], rel=GRADIENT_TOLERANCE)
    assert result["gradients"].keys() == wanted["gradients"].keys()
    assert not {
        name: error
        for name, grad in wanted["gradients"].items()
        if (error := relative(result["gradients"][name], grad)) > GRADIENT_TOLERANCE
    }
    for step, scores in zip(result["steps"], wanted["scores"], strict=True):
        metrics = _metrics(cell.objective, scores)
        for name in ("metrics", "held_out"):
            found = {key: value for key, value in step[name].items() if key in metrics}
            assert found == pytest.approx({key: metrics[key] for key in found}, abs=1e-5)
        assert metrics.keys() <= step["held_out"].keys()


def _metrics(objective: str, scores: torch.Tensor) -> dict[str, float]:
    """Some metrics of all documents together, from the scores [documents, outputs] of the plain loop."""
    targets = torch.tensor([target for _, each in examples(objective) for target in each], dtype=torch.float64)
    if objective == "classes":
        return {"accuracy": float((scores.argmax(1) == targets).double().mean())}
    if objective == "regression":
        pearson = torch.corrcoef(torch.stack([scores[:, 0].double(), targets]))[0, 1]
        return {"pearson": float(pearson), **Regression().score_metrics(scores[:, 0].double().numpy(), targets.numpy())}
    chosen, rejected = scores[:, 0].double().view(-1, 2).unbind(1)
    return {
        "reward_margin": float((chosen - rejected).mean()),
        "reward_accuracy": float((chosen > rejected).double().mean()),
    }


@pytest.mark.parametrize("run", CHOSEN, ids=ids_of(CHOSEN))
def test_steps_equal_those_of_a_plain_loop(run: Run, results: Path, bases: Path) -> None:
    _check(run, results, bases)


@pytest.mark.slow
@pytest.mark.parametrize("run", REST, ids=ids_of(REST))
def test_other_steps_equal_those_of_a_plain_loop(run: Run, rest: Path, bases: Path) -> None:
    _check(run, rest, bases)


def test_the_head_is_the_same_in_every_layout(results: Path, bases: Path) -> None:
    heads: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for cell, world in CHOSEN:
        found: dict[str, Any] = torch.load(results / f"{cell.name}-world={world}.pt", weights_only=True)
        heads.setdefault((cell.objective, cell.folder), []).append(found["head"]["score.weight"])
    assert any(len(same) > 1 for same in heads.values())
    assert all(torch.equal(head, same[0]) for same in heads.values() for head in same)

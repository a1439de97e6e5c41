"""Steps with `train.only` and `train.freeze` equal those of a plain loop in which the same parameters require no
gradient, in every layout, and these keep their bits.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finetune.plan.mesh import TESTED_LAYOUTS
from ds_finetune.reference.selftest.cells import Cell
from ds_finetune.reference.selftest.reference_loop import Steps, reference_steps
from tests.parity.optimizers import plain_optimizer
from tests.parity.options_worker import OptionCell
from tests.parity.reference import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    ids_of,
    launch,
    relative,
    result_of,
    runs_asked_for,
)

CLIP, DECAY, STEPS = 0.5, 0.1, 3
TRAINED = {
    "only": ("o_proj.", "lm_head.", "layernorm."),
    "freeze": ("mlp", "norm.weight", "lm_head", "layers.0.input_layernorm", "layernorm"),
    "experts": (".experts.", "model.norm.", "o_proj."),
    "one layer": ("model.layers.1.",),
}
"""What names of parameters contain that the options train."""
KEPT = {"only": ("layers.0.input_",), "freeze": ("self_attn",), "experts": ("shared",), "one layer": ("eh_proj",)}


def _cell(option: str, family: str, stage: int, **layout: Any) -> OptionCell:
    cell = Cell(family, stage, 2, True, max_grad_norm=CLIP, checkpointing=True, weight_decay=DECAY, **layout)
    return OptionCell(option, cell)


RUNS = [
    (_cell("only", "deepseek_v3", 3), 2),
    (_cell("freeze", "deepseek_v3", 1, tp=2), 2),
    (_cell("experts", "deepseek_v3", 2, ep=2), 2),
    (_cell("only", "qwen3", 1, pp=2), 2),
]
ALL = [
    *((_cell(option, "deepseek_v3", stage), 2) for option in TRAINED for stage in (0, 1, 2, 3)),
    *(
        (_cell(option, family, stage, **dict.fromkeys(row.axes, 2)), 4)
        for row in TESTED_LAYOUTS
        for option, family in (("only", "qwen3"), ("freeze", "deepseek_v3"))
        if family in row.families and len(row.axes) < 3 and not {"pp", "ep"} <= row.axes
        for stage in row.stages[-1:]
    ),
]
MORE_RUNS = [run for run in ALL if run not in RUNS]


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch("options_worker.py", RUNS, models, tmp_path_factory.mktemp("freezing"))


@pytest.fixture(scope="module")
def more_results(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = runs_asked_for(request, MORE_RUNS)
    return launch("options_worker.py", asked, models, tmp_path_factory.mktemp("freezing-more"))


def _is_trained(name: str, option: str) -> bool:
    return any(part in name for part in TRAINED[option]) and not any(part in name for part in KEPT[option])


@cache
def _plain_loop(folder: Path, option: str) -> tuple[Steps, set[str]]:
    """The steps of a plain loop, and the names of what it trains."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, param in model.named_parameters():
        param.requires_grad_(_is_trained(name, option))
    optimizer = partial(plain_optimizer, "AdamW", weight_decay=DECAY)
    steps = reference_steps(model, STEPS, CLIP, optimizer)
    return steps, {name for name, param in model.named_parameters() if param.requires_grad}


def _assert_equals_plain_loop(cell: OptionCell, world: int, out: Path, models: Path) -> None:
    folder, result = models / cell.cell.family, result_of(cell, world, out)
    wanted, trained = _plain_loop(folder, cell.option)
    assert trained
    # Optimizer states are those of what is trained, and of nothing else.
    assert result["gradients"][0].keys() == trained
    assert result["losses"][0] == pytest.approx(wanted.losses[0], abs=LOSS_TOLERANCE)
    assert result["losses"][1:] == pytest.approx(wanted.losses[1:], rel=1e-4)
    assert result["norms"][0] == pytest.approx(wanted.norms[0], rel=GRADIENT_TOLERANCE)
    errors = {name: relative(result["gradients"][0][name], wanted.gradients[name]) for name in trained}
    assert not {name: error for name, error in errors.items() if error > GRADIENT_TOLERANCE}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    changed = {name for name, tensor in result["frozen"].items() if not torch.equal(tensor, base[name])}
    assert changed == trained


@pytest.mark.parametrize(("cell", "world"), RUNS, ids=ids_of(RUNS))
def test_steps_equal_those_of_a_plain_loop(cell: OptionCell, world: int, results: Path, models: Path) -> None:
    _assert_equals_plain_loop(cell, world, results, models)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), MORE_RUNS, ids=ids_of(MORE_RUNS))
def test_further_steps_equal_those_of_a_plain_loop(
    cell: OptionCell, world: int, more_results: Path, models: Path
) -> None:
    _assert_equals_plain_loop(cell, world, more_results, models)

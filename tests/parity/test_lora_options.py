"""Steps with options of adapters: equal to those of peft, begun with an adapter that peft has saved, in every layout;
and the same with dropout on any ranks that share rows.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finetune.config.sections import LoraConfig
from ds_finetune.plan.mesh import TESTED_LAYOUTS
from ds_finetune.reference.selftest.cells import Cell
from ds_finetune.reference.selftest.reference_loop import reference_steps
from tests.lora_twin import adapted, in_peft, lora_tree, recording_adamw, write_adapter_of
from tests.parity.lora_worker import STEPS
from tests.parity.options_worker import LORA, START, OptionCell
from tests.parity.reference import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    ids_of,
    launch,
    relative,
    result_of,
    runs_asked_for,
)

pytest.importorskip("peft", reason="peft is not installed")
CLIP, AFTER_A_ROUNDING = 0.5, 2e-3
FAMILIES = ("deepseek_v3", "qwen3")


def _cell(family: str, stage: int, **layout: Any) -> OptionCell:
    return OptionCell("all", Cell(family, stage, 2, True, max_grad_norm=CLIP, checkpointing=True, **layout))


RUNS: list[tuple[OptionCell, int]] = [
    (_cell("deepseek_v3", 3), 2),
    (_cell("deepseek_v3", 1, tp=2), 2),
    (_cell("qwen3", 1, pp=2), 2),
]
ALL: list[tuple[OptionCell, int]] = [
    *((_cell(family, stage), 2) for family in FAMILIES for stage in (0, 1, 2, 3)),
    *(
        (_cell("deepseek_v3_deep" if {"pp", "ep"} <= row.axes else family, stage, **dict.fromkeys(row.axes, 2)), 4)
        for row in TESTED_LAYOUTS
        for family in FAMILIES
        if family in row.families and len(row.axes) < 3
        for stage in row.stages[-1:]
    ),
]
MORE_RUNS = [run for run in ALL if run not in RUNS]


def _write_start(folder: Path, out: Path) -> None:
    """Let peft save an adapter whose every tensor differs from a fresh one, for the options `all`."""
    lora = LoraConfig.model_validate(lora_tree(folder.name) | LORA["all"] | {"start": None})
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    write_adapter_of(adapted(base, lora, trained=False), lora, out / "fresh", base=folder)
    model = in_peft(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), out / "fresh", trainable=True)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator), alpha=0.02)
    model.save_pretrained(out / START / folder.name)


def _launch(runs: list[tuple[OptionCell, int]], models: Path, out: Path) -> Path:
    for family in sorted({run[0].cell.family for run in runs}):
        _write_start(models / family, out)
    return launch("options_worker.py", runs, models, out)


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _launch(RUNS, models, tmp_path_factory.mktemp("lora-options"))


@pytest.fixture(scope="module")
def more_results(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _launch(runs_asked_for(request, MORE_RUNS), models, tmp_path_factory.mktemp("lora-options-more"))


@cache
def _peft_loop(folder: Path, start: Path) -> dict[str, Any]:
    """Losses, norms and the gradients of every step, of peft's model in a plain loop."""
    lora = LoraConfig.model_validate(lora_tree(folder.name) | LORA["all"] | {"start": None})
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = adapted(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora, trained=False)
    names = [name for name, param in ours.named_parameters() if param.requires_grad]
    gradients: list[dict[str, torch.Tensor]] = []
    model = in_peft(base, start, trainable=True)
    steps = reference_steps(model, STEPS, CLIP, recording_adamw(gradients, names))
    return {"losses": steps.losses, "norms": steps.norms, "gradients": gradients}


def _assert_equals_peft(cell: OptionCell, world: int, out: Path, models: Path) -> None:
    family = cell.cell.family
    result, wanted = result_of(cell, world, out), _peft_loop(models / family, out / START / family)
    assert result["losses"] == pytest.approx(wanted["losses"], abs=LOSS_TOLERANCE)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=GRADIENT_TOLERANCE)
    first = wanted["gradients"][0].values()
    # Adam makes a whole step of a gradient of a rounding's size.
    has_rounding = any(float(each[each != 0].abs().min()) <= 1e-7 for each in first)
    for number, (mine, theirs) in enumerate(zip(result["gradients"], wanted["gradients"], strict=True)):
        assert mine.keys() == theirs.keys()
        errors = {name: relative(mine[name], grad) for name, grad in theirs.items()}
        limit = AFTER_A_ROUNDING if number and has_rounding else GRADIENT_TOLERANCE
        assert not {name: error for name, error in errors.items() if error > limit}
        # Unlike with a fresh B every tensor has a gradient in the first step.
        assert all(gradient.norm() > 0 for gradient in mine.values())


@pytest.mark.parametrize(("cell", "world"), RUNS, ids=ids_of(RUNS))
def test_steps_equal_those_of_peft(cell: OptionCell, world: int, results: Path, models: Path) -> None:
    _assert_equals_peft(cell, world, results, models)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), MORE_RUNS, ids=ids_of(MORE_RUNS))
def test_further_steps_equal_those_of_peft(cell: OptionCell, world: int, more_results: Path, models: Path) -> None:
    _assert_equals_peft(cell, world, more_results, models)


def _dropping(family: str, stage: int, **layout: Any) -> OptionCell:
    return OptionCell("dropout", Cell(family, stage, 2, packing=True, **layout))


def test_ranks_that_share_rows_drop_what_one_rank_drops(models: Path, tmp_path: Path) -> None:
    """Equal to dropout on one rank, whose masks are those of peft (tests/model/adapters/test_lora_options.py): with
    parts of activations on two ranks, and with layers computed again.
    """
    alone, again = _dropping("qwen3", 1), _dropping("qwen3", 1, checkpointing=True)
    shared = _dropping("qwen3", 1, checkpointing=True, tp=2)
    launch("options_worker.py", [(alone, 1), (again, 1), (shared, 2)], models, tmp_path)
    wanted = result_of(alone, 1, tmp_path)
    plain = result_of(again, 1, tmp_path)
    assert plain["losses"] == wanted["losses"]
    found = result_of(shared, 2, tmp_path)
    assert found["losses"] == pytest.approx(wanted["losses"], abs=LOSS_TOLERANCE)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=GRADIENT_TOLERANCE)

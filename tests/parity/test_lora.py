"""Steps with adapters equal those of peft in a plain loop, in every layout, and the base stays as it was."""

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finetune.config.sections import LoraConfig
from ds_finetune.families.table import FAMILIES
from ds_finetune.plan.mesh import TESTED_LAYOUTS
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell
from ds_finetune.reference.selftest.reference_loop import reference_steps
from tests.lora_twin import adapted, after_a_step, in_peft, lora_tree, recording_adamw, write_adapter_of
from tests.parity.lora_worker import STEPS
from tests.parity.reference import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    WORLDS,
    ids_of,
    launch,
    relative,
    result_of,
    runs_asked_for,
    runs_of,
)

pytest.importorskip("peft", reason="peft is not installed")
CLIP = 0.5
FP16_EPSILON = torch.finfo(torch.float16).eps
CLIPPED = [
    Cell(family, stage, 2, True, max_grad_norm=CLIP, checkpointing=True)
    for family in ("deepseek_v3", "llama")
    for stage in (0, 2, 3)
]
OTHERS = [name for name, family in FAMILIES.items() if family.has_lora and name not in ("deepseek_v3", "llama")]
CELLS = [cell for cell in CLIPPED if cell.family == "deepseek_v3" or cell.stage == 3]
MORE = [
    *(cell for cell in CLIPPED if cell not in CELLS),
    *(Cell(family, 1, 1, False) for family in ("deepseek_v3", "llama")),
    *(Cell(family, stage, 4, False) for family in OTHERS for stage in (0, 1, 2, 3)),
    *(Cell(family, stage, 2, True, offload="optimizer") for family in ("deepseek_v3", "llama") for stage in (1, 2, 3)),
    *(Cell(family, 3, 2, True, offload="param") for family in ("deepseek_v3", "llama")),
]
ROUNDED = [Cell("deepseek_v3", stage, 2, True, precision="bf16", checkpointing=True) for stage in (0, 1, 2, 3)]
ROUNDED += [
    Cell("deepseek_v3", stage, 2, True, precision="bf16", **{axis: 2}) for stage, axis in ((1, "tp"), (3, "ep"))
]
IN_FP16 = [
    Cell(family, stage, 2, True, precision="fp16", max_grad_norm=CLIP, checkpointing=True)
    for family, stage in (("deepseek_v3", 1), ("llama", 2), ("deepseek_v3", 3))
]
"""On a CPU, whose kernels compute in fp16 too, with DeepSpeed's dynamic loss scale."""
SHARDED = [
    Cell("deepseek_v3", stage, 2, True, max_grad_norm=CLIP, checkpointing=True, **{axis: 2})
    for stage, axis in ((1, "tp"), (3, "ep"), (1, "pp"))
]
LAYOUTS = [
    Cell(
        f"{family}_deep" if {"pp", "ep"} <= row.axes and f"{family}_deep" in TINY_MODELS else family,
        stage,
        2,
        packing=packing,
        max_grad_norm=CLIP if packing else 0.0,
        checkpointing=packing,
        **dict.fromkeys(row.axes, 2),
    )
    for number, (row, family) in enumerate(itertools.product(TESTED_LAYOUTS, ("deepseek_v3", "llama", *OTHERS)))
    if family in row.families
    for stage, packing in (
        itertools.product(row.stages, (True, False))
        if family == "deepseek_v3"
        else [(row.stages[number % len(row.stages)], number % 2 == 0)]
    )
]
"""Of deepseek_v3 all cells, of every other family one of each layout."""
LAYOUTS += [
    Cell(f"{family}_deep", stage, 2, packing=stage == 1, max_grad_norm=CLIP, checkpointing=stage == 1, pp=2, vpp=2)
    for family, stage in itertools.product(("deepseek_v3", "qwen3"), (0, 1))
]
DEFAULT_RUNS = [*runs_of(CELLS), *runs_of(SHARDED, worlds=WORLDS[-1:])]
FP16_RUNS = runs_of(IN_FP16, worlds=WORLDS[-1:])
LARGEST = [cell for cell in LAYOUTS if cell.family == "deepseek_v3_deep" and cell.layout.count(" x ") > 1]
MORE_RUNS = [
    run
    for run in [*runs_of(MORE), *runs_of(LAYOUTS, worlds=(2, 4)), *runs_of(LARGEST, worlds=(8,))]
    if run not in DEFAULT_RUNS
]


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch("lora_worker.py", [*DEFAULT_RUNS, *FP16_RUNS], models, tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def more_results(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(
        "lora_worker.py",
        runs_asked_for(request, [*MORE_RUNS, *runs_of(ROUNDED)]),
        models,
        tmp_path_factory.mktemp("lora-more"),
    )


@cache
def _peft_loop(folder: Path, max_grad_norm: float) -> dict[str, Any]:
    """Losses, norms and the gradients of every step, of peft's model in a plain loop."""
    base, lora = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        LoraConfig.model_validate(lora_tree(folder.name)),
    )
    ours = adapted(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora, trained=False)
    write_adapter_of(ours, lora, folder / "adapter", base=folder)
    names = [name for name, param in ours.named_parameters() if param.requires_grad]
    gradients: list[dict[str, torch.Tensor]] = []
    steps = reference_steps(
        in_peft(base, folder / "adapter", trainable=True), STEPS, max_grad_norm, recording_adamw(gradients, names)
    )
    return {"losses": steps.losses, "norms": steps.norms, "gradients": gradients}


def _assert_equals_peft(cell: Cell, result: dict[str, Any], models: Path) -> None:
    wanted = _peft_loop(models / cell.family, cell.max_grad_norm)
    assert result["losses"] == pytest.approx(wanted["losses"], abs=LOSS_TOLERANCE)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=GRADIENT_TOLERANCE)
    first = wanted["gradients"][0]
    for number, (mine, theirs) in enumerate(zip(result["gradients"], wanted["gradients"], strict=True)):
        assert mine.keys() == theirs.keys()
        errors = {name: relative(mine[name], grad) for name, grad in theirs.items()}
        limits = {name: GRADIENT_TOLERANCE + (after_a_step(name, first) if number else 0) for name in errors}
        assert not {name: error for name, error in errors.items() if error > limits[name]}
    # B is zero at first, so A's gradient shows in the second step.
    assert all(gradient.norm() > 0 for gradient in result["gradients"][1].values())
    base = AutoModelForCausalLM.from_pretrained(models / cell.family, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, base[name]) for name, tensor in result["frozen"].items())


@pytest.mark.parametrize(("cell", "world"), DEFAULT_RUNS, ids=ids_of(DEFAULT_RUNS))
def test_steps_equal_those_of_peft(cell: Cell, world: int, results: Path, models: Path) -> None:
    _assert_equals_peft(cell, result_of(cell, world, results), models)


@pytest.mark.parametrize(("cell", "world"), FP16_RUNS, ids=ids_of(FP16_RUNS))
def test_fp16_follows_fp32(cell: Cell, world: int, results: Path, models: Path) -> None:
    """No step is skipped for an overflow, and what is frozen are the rounded weights of the model."""
    result, wanted = result_of(cell, world, results), _peft_loop(models / cell.family, cell.max_grad_norm)
    assert result["losses"] == pytest.approx(wanted["losses"], rel=4 * FP16_EPSILON)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=16 * FP16_EPSILON)
    base = AutoModelForCausalLM.from_pretrained(models / cell.family, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, base[name].to(tensor.dtype)) for name, tensor in result["frozen"].items())


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), MORE_RUNS, ids=ids_of(MORE_RUNS))
def test_further_steps_equal_those_of_peft(cell: Cell, world: int, more_results: Path, models: Path) -> None:
    _assert_equals_peft(cell, result_of(cell, world, more_results), models)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), runs_of(ROUNDED), ids=ids_of(runs_of(ROUNDED)))
def test_bf16_follows_fp32(cell: Cell, world: int, more_results: Path, models: Path) -> None:
    """Weights rounded to bf16 show in the third digit; an adapter left out would show in the second."""
    result, wanted = (
        result_of(cell, world, more_results),
        _peft_loop(models / cell.family, replace(cell, precision="fp32").max_grad_norm),
    )
    assert result["losses"] == pytest.approx(wanted["losses"], rel=1.5e-2)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=5e-2)

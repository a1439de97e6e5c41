"""Steps over weights in four bits equal those of transformers, bitsandbytes and peft in a plain loop, bit for bit of
what is frozen.
"""

import itertools
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from ds_finetune.config.sections import LoraConfig
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.plan.lora_targets import nf4_bytes
from ds_finetune.plan.mesh import TESTED_LAYOUTS
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell
from ds_finetune.reference.selftest.reference_loop import reference_steps
from tests.lora_twin import (
    adapted,
    four_bit_tensors,
    has_rounding,
    in_peft,
    lora_tree,
    recording_adamw,
    set_choices,
    write_adapter_of,
)
from tests.pairwise import pairwise
from tests.parity.lora_worker import STEPS
from tests.parity.reference import GRADIENT_TOLERANCE, ids_of, launch, relative, result_of, runs_asked_for, runs_of

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra `quantize`)")
LOSS_TOLERANCE = 1e-5
FIRST_TOLERANCE, AFTER_A_ROUNDING, BESIDE_A_ROUNDING = 1e-5, 1e-2, 5e-4
"""Of all gradients in the first step; in later ones of an adapter with a rounding (`has_rounding`), and of others beside
it.
"""
CLIP = 0.5
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "v_head_dim": 16,
    "num_attention_heads": 4,
}
"""Rows of whole blocks, but for the shared experts' `down_proj` and the `o_proj` of qwen3 and qwen3_moe."""
OTHERS = [name for name, family in FAMILIES.items() if family.has_lora and name not in ("deepseek_v3", "qwen2")]
CELLS = [
    Cell(family, stage, 2, True, max_grad_norm=CLIP, checkpointing=True)
    for family in ("deepseek_v3", "qwen2")
    for stage in (0, 1, 2, 3)
]
MORE = [Cell(family, stage, 4, False) for family in ("deepseek_v2", "qwen3", "llama") for stage in (0, 2, 3)]
MORE += [Cell(family, stage, 2, True) for family in OTHERS for stage in (2, 3)]
MORE += [
    Cell(
        f"{family}_deep" if {"pp", "ep"} <= row.axes else family,
        stage,
        2,
        True,
        # Scaled down, more gradients of DeepSeek-V4 are of a rounding's size.
        max_grad_norm=0.0 if FAMILIES[family].compresses else CLIP,
        **dict.fromkeys(row.axes, 2),
    )
    for row, family in itertools.product(TESTED_LAYOUTS, ("deepseek_v3", "qwen2", "deepseek_v4"))
    if "tp" not in row.axes and family in row.families
    for stage in (row.stages if family == "deepseek_v3" else row.stages[-1:])
]
"""Every layout in which a rank holds whole matrices."""
MORE += [Cell("deepseek_v3_deep", stage, 2, True, max_grad_norm=CLIP, pp=2, vpp=2) for stage in (0, 1)]
ROUNDED = [
    Cell(family, stage, 2, True, precision="bf16", checkpointing=True)
    for family in ("deepseek_v3", "qwen2")
    for stage in (0, 1, 2, 3)
]
IN_FP16 = [
    Cell(family, stage, 2, True, precision="fp16", max_grad_norm=CLIP, checkpointing=True)
    for family, stage in (("deepseek_v3", 1), ("qwen2", 2), ("qwen2", 3))
]
FP16_RUNS = runs_of(IN_FP16, worlds=(2,))
FP16_EPSILON = torch.finfo(torch.float16).eps
CHOSEN = pairwise(runs_of(CELLS), lambda run: (run[0].family, run[0].stage, run[1]))
"""Every pair of values of two axes; the full product is behind the marker."""
REST = [run for run in runs_of(CELLS + MORE, worlds=(1, 2, 4)) if run not in CHOSEN and run[1] <= 2 * run[0].sharing]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    for family in {cell.family for cell in CELLS + MORE}:
        sizes = TINY_MODELS[family]
        config = AutoConfig.for_model(
            **{"model_type": family} | sizes | {name: size for name, size in WIDE.items() if name in sizes}
        )
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config).float()
        if FAMILIES[config.model_type].compresses:
            set_choices(model)
        model.save_pretrained(folder / family)
    return folder


def _by_transformers(folder: Path) -> PreTrainedModel:
    """As transformers and bitsandbytes quantise it, but for the head, gates, indexers and rows that blocks cross."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    linears = [(name, module) for name, module in plain.named_modules() if isinstance(module, nn.Linear)]
    full = (".indexer.", ".compressor.", ".shared_expert_gate")
    kept = [
        name
        for name, module in linears
        if module.in_features % 64 or any(part in name for part in full) or type(module) is not nn.Linear
    ]
    asked = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    }
    nf4 = BitsAndBytesConfig(**asked, llm_int8_skip_modules=["lm_head", *kept])
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=nf4)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch("lora_worker.py", [*CHOSEN, *FP16_RUNS], models, tmp_path_factory.mktemp("qlora"), "nf4")


@pytest.fixture(scope="module")
def more_results(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(
        "lora_worker.py",
        runs_asked_for(request, [*REST, *runs_of(ROUNDED)]),
        models,
        tmp_path_factory.mktemp("qlora-more"),
        "nf4",
    )


@cache
def _plain_loop(folder: Path, max_grad_norm: float) -> dict[str, Any]:
    """Losses, norms and gradients of every step, and what is frozen in four bits, without code of ours beside the
    adapter's first values.
    """
    base, lora = _by_transformers(folder), LoraConfig.model_validate(lora_tree(folder.name))
    ours = adapted(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora, trained=False)
    write_adapter_of(ours, lora, folder / "adapter", base=folder)
    names = [name for name, param in ours.named_parameters() if param.requires_grad]
    linears = {name: module for name, module in base.named_modules() if type(module).__name__ == "Linear4bit"}
    frozen = {f"{name}.weight": four_bit_tensors(module.weight) for name, module in linears.items()}
    for module in linears.values():
        # In eval mode bitsandbytes packs weights for inference on some CPUs, and fails on these small ones.
        module.support_avx512bf16_for_cpu = False
    gradients: list[dict[str, torch.Tensor]] = []
    steps = reference_steps(
        in_peft(base, folder / "adapter", trainable=True), STEPS, max_grad_norm, recording_adamw(gradients, names)
    )
    return {"losses": steps.losses, "norms": steps.norms, "gradients": gradients, "four_bit": frozen}


def _assert_equals_plain_loop(cell: Cell, result: dict[str, Any], models: Path) -> None:
    wanted = _plain_loop(models / cell.family, cell.max_grad_norm)
    assert result["losses"] == pytest.approx(wanted["losses"], abs=LOSS_TOLERANCE)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=GRADIENT_TOLERANCE)
    first = wanted["gradients"][0]
    for mine, theirs in zip(result["gradients"], wanted["gradients"], strict=True):
        assert mine.keys() == theirs.keys()
        assert not {
            name: error
            for name, grad in theirs.items()
            if (error := relative(mine[name], grad)) > _tolerance(name, first)
        }
    assert not {
        name: error
        for name, grad in first.items()
        if (error := relative(result["gradients"][0][name], grad)) > FIRST_TOLERANCE
    }
    assert all(gradient.norm() > 0 for gradient in result["gradients"][1].values())
    _assert_frozen(cell, result, wanted["four_bit"], models)


def _tolerance(name: str, first: dict[str, torch.Tensor]) -> float:
    if has_rounding(name, first):
        return AFTER_A_ROUNDING
    return BESIDE_A_ROUNDING if any(has_rounding(other, first) for other in first) else GRADIENT_TOLERANCE


def _assert_frozen(
    cell: Cell, result: dict[str, Any], wanted: dict[str, dict[str, torch.Tensor]], models: Path
) -> None:
    """The same bits as transformers and bitsandbytes made, in as many bytes as are announced; all else as it is in the
    model.
    """
    held = {name.replace(".base_layer", ""): parts for name, parts in result["four_bit"].items()}
    assert held.keys() == wanted.keys()
    assert all(torch.equal(part, wanted[name][key]) for name, parts in held.items() for key, part in parts.items())
    lora, config = LoraConfig(quantize="nf4"), AutoConfig.from_pretrained(models / cell.family)
    lora_plan = plan_lora(config, lora)
    targets = lora_plan.quantised
    for target in targets:
        weight = f"{target.name}.weight"
        assert nf4_bytes(target.shapes["weight"]) == sum(
            part.numel() * part.itemsize for part in held[weight].values()
        ), weight
    size = sum(part.numel() * part.itemsize for parts in held.values() for part in parts.values())
    numel = sum(prod(target.shapes["weight"]) for target in targets)
    assert f"{len(held)} weights, {numel:,} parameters in {size:,} bytes" in dict(lora_plan.lines())["  frozen in nf4"]
    base = AutoModelForCausalLM.from_pretrained(models / cell.family, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, base[name]) for name, tensor in result["frozen"].items() if name not in held)
    assert all(0.05 < (result["frozen"][name] - base[name]).norm() / base[name].norm() < 0.15 for name in held)


@pytest.mark.parametrize(("cell", "world"), CHOSEN, ids=ids_of(CHOSEN))
def test_steps_equal_those_of_peft_and_bitsandbytes(cell: Cell, world: int, results: Path, models: Path) -> None:
    _assert_equals_plain_loop(cell, result_of(cell, world, results), models)


@pytest.mark.parametrize(("cell", "world"), FP16_RUNS, ids=ids_of(FP16_RUNS))
def test_fp16_follows_fp32(cell: Cell, world: int, results: Path, models: Path) -> None:
    result, wanted = result_of(cell, world, results), _plain_loop(models / cell.family, cell.max_grad_norm)
    assert result["losses"] == pytest.approx(wanted["losses"], rel=4 * FP16_EPSILON)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=16 * FP16_EPSILON)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), REST, ids=ids_of(REST))
def test_further_steps_equal_those_of_peft_and_bitsandbytes(
    cell: Cell, world: int, more_results: Path, models: Path
) -> None:
    _assert_equals_plain_loop(cell, result_of(cell, world, more_results), models)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), runs_of(ROUNDED), ids=ids_of(runs_of(ROUNDED)))
def test_bf16_follows_fp32(cell: Cell, world: int, more_results: Path, models: Path) -> None:
    result, wanted = (
        result_of(cell, world, more_results),
        _plain_loop(models / cell.family, replace(cell, precision="fp32").max_grad_norm),
    )
    assert result["losses"] == pytest.approx(wanted["losses"], rel=1.5e-2)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=5e-2)

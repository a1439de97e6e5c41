"""Run many cells with adapters inside one launched world: a few optimizer steps each.

Started by the tests as `torchrun --nproc-per-node N lora_worker.py MODELS_DIR OUT_DIR CELLS.json [QUANTIZE]`.
"""

import sys
from typing import Any

import torch
from torch import nn

from ds_finetune.engine.engine import Engine
from ds_finetune.engine.state.full_tensors import gather_zero3
from ds_finetune.model.quantised.four_bit import is_four_bit
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.reference.selftest.compare import first_moments, of_all_stages, take_steps
from ds_finetune.reference.selftest.reference_loop import BETAS
from tests.lora_twin import four_bit_tensors, lora_tree
from tests.parity.serving import Launched, allow_fp16, serve

STEPS = 3


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """The first steps of a cell with adapters."""
    cell, ranks = Cell(**tree), launched.world.world_size
    if cell.precision == "fp16":
        allow_fp16()
    lora = lora_tree(cell.family) | ({"quantize": sys.argv[4]} if sys.argv[4:] else {})
    run_file = run_tree(cell, launched.models / cell.family, launched.out, dp=ranks // cell.sharing) | {"lora": lora}
    with launched.engine(run_file) as engine:
        return f"{cell.name}-world={ranks}", steps_of(engine)


def steps_of(engine: Engine) -> dict[str, Any]:
    """Losses, norms and gradients of the first steps, and what is frozen after them."""
    moments: list[dict[str, torch.Tensor]] = []
    for found in take_steps(engine, STEPS):
        steps = found
        moments.append(of_all_stages(engine, first_moments(engine)) if engine.plan.precision == "fp32" else {})
    return {
        "losses": steps.losses,
        "norms": steps.norms,
        "gradients": _gradients(moments),
        "frozen": {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None},
        "four_bit": of_all_stages(engine, _four_bit(engine.lm)),
    }


def _gradients(moments: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Gradients of each step from Adam's first moments after them."""
    before = [{name: torch.zeros_like(moment) for name, moment in moments[0].items()}, *moments]
    return [
        {name: (m - BETAS[0] * old[name]) / (1 - BETAS[0]) for name, m in new.items()}
        for old, new in zip(before, moments, strict=False)
    ]


def _four_bit(lm: nn.Module) -> Any:
    """All that is kept of the weights in four bits; gathered one at a time where ZeRO-3 has them in parts."""
    found = {}
    for name, param in lm.named_parameters():
        if is_four_bit(param):
            assert not hasattr(param, "ds_tensor") or not param.numel(), f"{name} is whole between steps"
            with gather_zero3(param):
                found[name] = four_bit_tensors(param)
    return found


if __name__ == "__main__":
    serve(run)

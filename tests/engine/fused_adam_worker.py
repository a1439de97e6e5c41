"""Started by the tests as `torchrun worker.py FOLDER CELLS.json`: DeepSpeed's FusedAdam on CPUs, its CUDA kernel
written out in torch.

Everything around the kernel is what runs on a GPU: DeepSpeed's bookkeeping and wrappers, and in fp16 the loss scale.
"""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest import compare
from ds_finetune.reference.selftest.cells import Cell, hf_config, run_tree
from ds_finetune.system.world import World
from tests.parity.serving import allow_fp16

Tensors = list[torch.Tensor]


def multi_tensor_adam(
    chunk: int,
    skip: torch.Tensor,
    lists: list[Tensors],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    is_decoupled: int,
    bias_correction: int,
    decay: float,
) -> None:
    """DeepSpeed 0.19.8, ops/csrc/adam/multi_tensor_adam.cu."""
    assert is_decoupled
    assert bias_correction
    for grad, param, m, v in zip(*lists, strict=True):
        g = grad.float()
        m.copy_(beta1 * m.float() + (1 - beta1) * g)
        v.copy_(beta2 * v.float() + (1 - beta2) * g * g)
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + decay * param
        param.data.copy_(param - lr * update)


def main() -> None:
    """Check every cell against the plain loop and let rank zero write how far each is off."""
    folder, cells = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    _put_in_place()
    compare.make_plan = _fused_plan
    found = {}
    with process_group(world, device):
        for name, tree in cells.items():
            tree, takes_torchs = dict(tree), name.startswith("resumed by torch")
            compare.start_engine = partial(_start, takes_torchs=takes_torchs)
            cell = Cell("deepseek_v3", **tree)
            run = run_tree(cell, folder / "model", folder / name, dp=world.world_size)
            if world.rank == 0 and not (folder / "model").exists():
                compare.write_model(hf_config("deepseek_v3"), folder / "model")
            torch.distributed.barrier()
            comparison = compare.compare_layout(RunSettings.of(run), world, device, folder / name, steps=3)
            if comparison is not None:
                found[name] = {"is_equal": comparison.is_equal, "text": comparison.text(), **comparison.differences}
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def _put_in_place() -> None:
    from deepspeed.ops.op_builder import FusedAdamBuilder

    FusedAdamBuilder.load = lambda self, verbose=True: SimpleNamespace(multi_tensor_adam=multi_tensor_adam)
    allow_fp16()


def _fused_plan(run: RunSettings, *, world: World, device: str) -> Plan:
    plan = make_plan(run, world=world, device=device)
    params = plan.deepspeed_config["optimizer"]["params"]
    kept = {key: value for key, value in params.items() if key not in ("torch_adam", "fused")}
    return replace(plan, deepspeed_config=plan.deepspeed_config | {"optimizer": {"type": "AdamW", "params": kept}})


def _start(plan: Plan, *arguments: Any, takes_torchs: bool, loads_weights: bool = True) -> Any:
    """The engine, which has torch's AdamW where it resumes what FusedAdam has saved on a host that could compile it."""
    instead = plan.with_torch_adam("") if takes_torchs and not loads_weights else plan
    return start_engine(instead, *arguments, loads_weights=loads_weights)


if __name__ == "__main__":
    main()
    exit_process()

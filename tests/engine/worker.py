"""Started by the tests as `torchrun --nproc-per-node 2 worker.py MODELS_DIR OUT.json`: what the engine does when a
step goes wrong.
"""

import gc
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schedule import LrSchedule
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import Batch, training_batches
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.patches.deepspeed_engine import gradients_reduced_at_end
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import SAMPLES, Cell, rows, run_tree
from ds_finetune.reference.selftest.compare import batch_plan
from ds_finetune.system.world import World
from ds_finetune.trainer.loop import training_steps
from tests.planning import model_of

STEPS = 4
OFFLOADED = ((2, "fp32"), (2, "bf16"), (3, "bf16"))
MODEL, MTP_MODEL = "deepseek_v3", "with_mtp"


def main() -> None:
    """Run every case and let rank zero write what came of it."""
    world, device = World.from_environment(os.environ), choose_device()
    found: dict[str, Any] = {}
    with process_group(world, device):
        for stage in (0, 1, 2, 3):
            for precision in ("fp32", "bf16"):
                with _engine(
                    world, device, Cell("deepseek_v3", stage, 2, packing=False, precision=precision)
                ) as engine:
                    found[f"plain-{stage}-{precision}"] = [record.values["train/loss"] for record in _steps(engine)]
                if len(found) == 1:
                    # ZeRO-3 collects garbage at each start; this excludes everything imported so far.
                    gc.freeze()
                with _engine(
                    world, device, Cell("deepseek_v3", stage, 2, packing=False, precision=precision, balances=True)
                ) as engine:
                    found[f"poisoned-{stage}-{precision}"] = _poisoned(engine, 1, "model.norm")
            with _engine(world, device, Cell("deepseek_v3", stage, 2, packing=False)) as engine:
                _route_apart(engine, world.rank)
                found[f"apart-{stage}"] = [record.values["train/loss"] for record in _steps(engine)]
        for stage, precision, (rank, module) in itertools.product(
            (0, 1), ("fp32", "bf16"), enumerate(("model.layers.0.input_layernorm", "model.norm"))
        ):
            if stage or precision == "fp32":
                with _engine(
                    world,
                    device,
                    Cell("deepseek_v3", stage, 2, packing=False, precision=precision, pp=2, balances=True),
                ) as engine:
                    found[f"pipeline-{stage}-{precision}-{rank}"] = _poisoned(engine, rank, module)
        for stage, precision in ((1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")):
            # At stage 1 the first pipeline stage has to skip the step too, though it has no part of the layer.
            pp = 2 if stage == 1 else 1
            cell = Cell("deepseek_v3", stage, 2, packing=False, precision=precision, pp=pp)
            with _engine(world, device, cell, model=MTP_MODEL, mtp={"train": True, "detach": True}) as engine:
                layer = f"model.layers.{engine.lm.config.num_hidden_layers}.eh_proj"
                found[f"mtp-{stage}-{precision}"] = _poisoned(engine, 1, layer)
        for stage, precision in OFFLOADED:
            cell = Cell("deepseek_v3", stage, 2, packing=False, precision=precision, offload="optimizer")
            with _engine(world, device, cell, model=MTP_MODEL, mtp={"train": True, "detach": True}) as engine:
                found[f"offloaded-{stage}-{precision}"] = _poisoned(engine, 1, "model.norm")
        with _engine(world, device, Cell("deepseek_v3", 1, 2, packing=False)) as engine:
            found["alone"] = _error_on_one_rank(engine, world.rank)
    if world.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))


def _engine(world: World, device: str, cell: Cell, *, model: str = MODEL, **sections: Any) -> Any:
    folder = Path(sys.argv[1])
    tree = run_tree(cell, folder / model, folder, dp=world.world_size // cell.sharing)
    config = RunConfig.model_validate(tree | sections)
    return start_engine(make_plan(RunSettings.of(config), world=world, device=device), model_of(config))


def _batches(engine: Engine) -> Iterator[Batch]:
    plan = replace(batch_plan(engine.plan), looks_ahead=bool(mtp_layers(engine.lm.config)))
    return training_batches(rows(packing=False), plan, start_step=0, total_rows=STEPS * SAMPLES)


def _steps(engine: Engine) -> list[Any]:
    schedule = LrSchedule(name="linear", lr=1e-3, min_lr_ratio=0.0, warmup_steps=0, steps=STEPS)
    return list(training_steps(engine, _batches(engine), schedule))


def _poisoned(engine: Engine, rank: int, module: str) -> dict[str, Any]:
    """The gradient of what enters `module` on `rank` becomes NaN in the second step only."""
    calls = 0

    def poison(module: torch.nn.Module, inward: tuple[torch.Tensor, ...], outward: object) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        calls += 1
        return tuple(grad * float("nan") for grad in inward) if calls in (3, 4) else inward

    if engine.plan.world.rank == rank:
        engine.lm.get_submodule(module).register_full_backward_hook(poison)
    schedule = LrSchedule(name="linear", lr=1e-3, min_lr_ratio=0.0, warmup_steps=0, steps=STEPS)
    before: dict[str, torch.Tensor] = {}
    unchanged = None
    records = []
    for record in training_steps(engine, _batches(engine), schedule):
        now = {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None}
        if record.step == 2:
            unchanged = all(torch.equal(tensor, before[name]) for name, tensor in now.items())
        before = now
        records.append(record)
    return {
        "skipped": [record.values["train/skipped"] for record in records],
        "total": records[-1].values["train/skipped_steps"],
        "lr": [record.values["optim/lr"] for record in records],
        "culprit": records[1].notice,
        "unchanged": unchanged,
        "loss": [record.values["train/loss"] for record in records],
    }


def _error_on_one_rank(engine: Engine, rank: int) -> bool:
    """Rank 0 fails with gradients that wait to be reduced, which rank 1 never does."""
    if rank:
        return False
    try:
        with gradients_reduced_at_end(engine._ds, zero_stage=1):
            out = engine._forward(engine.prepare(next(_batches(engine))).rows[0], None)
            engine._ds.backward(out.loss, scale_wrt_gas=False)
            raise MemoryError  # noqa: TRY301
    except MemoryError:
        return True


def _route_apart(engine: Engine, rank: int) -> None:
    """Each rank's router bias sends every token to experts of its own, which the other rank never uses."""
    for name, buffer in engine.lm.named_buffers():
        if name.endswith("e_score_correction_bias"):
            half = len(buffer) // 2
            buffer[rank * half : (rank + 1) * half] += 10.0


if __name__ == "__main__":
    main()
    exit_process()

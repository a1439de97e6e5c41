"""One layout held against the plain loop: loss, gradients, norm, resume and export, each as how far it is off."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PretrainedConfig

from ds_finetune.checkpoint.folder import open_checkpoint_folder
from ds_finetune.checkpoint.restore import newest_checkpoint, restore_engine
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.saver import Saver
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.collectives import all_gather_object
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.prepare_ops import build_ops
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.errors import CheckpointError
from ds_finetune.export.folder import FolderParts, write_folder
from ds_finetune.families.table import family_of
from ds_finetune.model.build import read_hf_config
from ds_finetune.model.dtypes import PRECISION_DTYPES
from ds_finetune.model.model_plan import plan_model
from ds_finetune.plan.combinations import check_divides
from ds_finetune.plan.plan import make_plan
from ds_finetune.selftest.reference_loop import Steps, mean_loss, reference_loop
from ds_finetune.selftest.steps import eval_loss, take_steps
from ds_finetune.trainer.run_dir import read_json
from ds_finetune.units import GIB
from ds_finetune.world import World

_FEW = 3
_CURVE = 2e-4
"""How far a loss may be off beyond the first few steps, over which roundings grow."""
_EXACT = {"loss": 1e-5, "gradient": 1e-4, "norm": 1e-4, "resume": 1e-5, "export": 1e-5, "answers": 0.0}
_ROUNDED = {"loss": 1.5e-2, "norm": 2e-2, "resume": 1e-3, "export": 1.5e-2}
"""In 16 bits weights round losses in the third digit; a gradient left out would show in the second."""


@dataclass(frozen=True)
class LayoutComparison:
    """How far a layout is off, and how far it may be.

    `loss` of each step, `resume` and `export` in nats, `gradient` and `norm` relative, `answers` by how many differ.
    """

    differences: dict[str, float]
    limits: dict[str, float]

    @property
    def is_equal(self) -> bool:
        """Whether nothing is further off than it may be; NaN is."""
        return all(self.differences[name] <= limit for name, limit in self.limits.items())

    def text(self) -> str:
        """One line."""
        limits = {
            name: "" if self.differences[name] <= limit else f" (limit {limit:.0e})"
            for name, limit in self.limits.items()
        }
        return ", ".join(f"{name} {self.differences[name]:.1g}{limits[name]}" for name in self.limits)


def write_model(config: PretrainedConfig, folder: Path) -> None:
    """A tiny model of `config`, the same on every machine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


def compare_layout(
    config: RunConfig, world: World, device: str, folder: Path, *, steps: int
) -> LayoutComparison | None:
    """Hold `steps` (2 or more) of the layout of `config` against the plain loop on its tiny model; the verdict is rank
    zero's.

    `folder` is shared by all ranks.
    """
    plan = build_ops(make_plan(config, world=world, device=device), all_gather_object, _ignore)
    hf_config = read_hf_config(config.model.path)
    check_divides(plan.mesh, hf_config.to_dict(), pp_layers=config.parallel.pp_layers)
    # Before any engine: the rotary frequencies of the first model that from_pretrained builds after DeepSpeed 0.19.8's
    # zero.Init are unset memory.
    wanted = _reference_steps(config.model.path, steps, config.train.max_grad_norm) if world.rank == 0 else Steps()
    model = plan_model(hf_config, config.model, config.parallel, config.lora)
    with start_engine(plan, model) as engine:
        taken = _steps_with_checkpoint(engine, folder, steps)
        loss = eval_loss(engine)
        _export(engine, config.model.path, folder / "export")
    with start_engine(plan, model, has_weights=False) as engine:
        resumed = _steps_after_resume(engine, folder, steps - 1)
    if world.rank:
        return None
    reloaded = mean_loss(folder / "export", PRECISION_DTYPES[config.train.precision])
    return compare_steps(wanted, taken, resumed, abs(reloaded - loss))


def _ignore(_: str) -> None:
    """Reported once, before the first layout."""


def compare_steps(wanted: Steps, steps: Steps, resumed: Steps, export: float) -> LayoutComparison:
    """How far `steps` are off those `wanted`, steps `resumed` after the first off the same steps, and `export` its
    loss.
    """
    found = {
        "loss": _largest_difference(steps.losses, wanted.losses),
        "norm": _largest(abs(norm - other) / other for norm, other in zip(steps.norms, wanted.norms, strict=True)),
        "resume": _largest_difference(resumed.losses, steps.losses[1:]),
        "export": export,
        "answers": float(sum(one != other for one, other in zip(steps.answers, wanted.answers, strict=True))),
    }
    is_exact = bool(steps.gradients)
    if is_exact:
        assert steps.gradients.keys() == wanted.gradients.keys(), "the layout has other parameters"
        pairs = ((steps.gradients[name], grad) for name, grad in wanted.gradients.items())
        found["gradient"] = _largest(
            float((grad - other).norm() / other.norm().clamp_min(1e-12)) for grad, other in pairs
        )
    limits = _EXACT if is_exact else _ROUNDED
    if len(steps.losses) > _FEW:
        limits = limits | {"loss": max(limits["loss"], _CURVE), "norm": max(limits["norm"], _CURVE * 10)}
    return LayoutComparison(found, limits)


@cache
def _reference_steps(model: str, steps: int, max_grad_norm: float) -> Steps:
    return reference_loop(Path(model), steps=steps, max_grad_norm=max_grad_norm)


def _largest_difference(found: list[float], wanted: list[float]) -> float:
    return _largest(abs(one - other) for one, other in zip(found, wanted, strict=True))


def _largest(values: Iterable[float]) -> float:
    """The largest value, NaN where there is one."""
    return float(torch.tensor([*values], dtype=torch.float64).max())


def _steps_with_checkpoint(engine: Engine, folder: Path, steps: int) -> Steps:
    """The steps, with a checkpoint of the first one left in `folder`."""
    saver = Saver(
        engine.state.groups, open_checkpoint_folder(folder, rank=engine.plan.world.rank, node_local=False), False, {}
    )
    with closing(saver):
        taking = take_steps(engine, steps)
        next(taking)
        state = RunState(1, 0, 0, (0, 0), engine.state.scalars(), {}, {}, "", {}, {}, {})
        saver.save(1, state.text(), rank_state={})
        outcome = saver.settle(wait=True)
        if outcome is None or outcome.has_failed:
            raise CheckpointError(
                f"nothing could be saved in {folder}: {outcome}",
                hint="name a folder that all hosts share and may write to",
            )
        return list(taking)[-1]


def _steps_after_resume(engine: Engine, folder: Path, steps: int) -> Steps:
    """The steps after the first, from the checkpoint."""
    place = open_checkpoint_folder(folder, rank=engine.plan.world.rank, node_local=False)
    found = newest_checkpoint(place, folder)
    assert found is not None
    restore_engine(engine, place, found)
    return list(take_steps(engine, steps))[-1]


def _export(engine: Engine, model: str, out: Path) -> None:
    config = read_json(Path(model) / "config.json")
    family = family_of(config["model_type"])
    parts = FolderParts(
        family=family,
        config=config,
        architecture=type(engine.lm).__name__,
        dtype=PRECISION_DTYPES[engine.plan.precision],
        files=(),
    )
    write_folder(engine.tensors(), engine.tensor_specs(), out, parts, max_shard_bytes=GIB)
    dist.barrier()

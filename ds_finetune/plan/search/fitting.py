"""Compares estimated with available memory: finds the largest micro-batch that fits, the recomputation that fits, and
changes of a run file after which the run fits.
"""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ds_finetune.config.units import GIB
from ds_finetune.errors import FinetuneError
from ds_finetune.plan.deepspeed_config import read_choices
from ds_finetune.plan.estimate.memory import MemoryEstimate, RunMemory
from ds_finetune.plan.plan import Plan, Recomputation, make_plan

SPARE = 0.07
"""Fraction of the memory that stays free, for fragmentation and for steps that need more than others."""


def largest_micro_batch(run: RunMemory, *, budget: int) -> int:
    """Largest micro-batch that divides the global batch and leaves `SPARE` of the device's `budget` bytes free; 0 where
    one row does not fit. The plan of `run` may have any micro-batch.
    """
    sizes = run.plan.legal_micro_batches
    number = bisect_left(sizes, True, key=lambda rows: not fits(run.bytes_of(rows), budget))
    return sizes[number - 1] if number else 0


def fits(num_bytes: int, budget: int) -> bool:
    """Whether `num_bytes` leave the fraction `SPARE` of `budget` bytes free."""
    return num_bytes <= usable(budget)


def usable(num_bytes: int) -> int:
    """Bytes that a run may take of a memory of `num_bytes`: all but the fraction `SPARE`."""
    return int((1 - SPARE) * num_bytes)


def chosen_recomputation(run: RunMemory, *, budget: int | None) -> tuple[Recomputation, str]:
    """Resolve `train.activation_checkpointing: auto` for devices of `budget` bytes (None if unknown). Returns the
    recomputation and the reason. If `train.micro_batch_size` is still `auto`, the plan has one row per micro-batch.
    """
    plan = run.plan
    if plan.device == "cpu":
        return "full", "on CPUs"
    if budget is None:
        return "full", "the memory of the GPU is not known; selective where it fits"
    try:
        need = run.with_plan(plan.with_recomputation("selective")).estimate().device_bytes
    except FinetuneError as unknown:
        return "full", f"its memory is not known: {unknown.message}"
    text = f"{need / GIB:.1f} of {budget / GIB:.1f} GiB by the estimate at micro-batch {plan.micro_batch_size}"
    if fits(need, budget):
        return "selective", f"it takes {text}"
    return "full", f"selective would take {text}, and {SPARE:.0%} stay free"


HOST_SHARE = 3
"""Assumed memory of a node relative to that of its accelerators, as in a DGX H100: 2 TB for 8 x 80 GB."""


@dataclass(frozen=True)
class Budget:
    """Memory of a rank in bytes, of which a run leaves the fraction `SPARE` free."""

    device_bytes: int
    """Memory of the rank's accelerator; for CPU ranks that of the host."""
    host_bytes: int
    """Memory of the rank's host, which the ranks of the host share."""

    def excess(self, memory: MemoryEstimate) -> int:
        """Bytes by which an estimate exceeds the budget of the device or of the host, whichever is more; 0 where it
        fits.
        """
        return max(0, memory.device_bytes - usable(self.device_bytes), memory.host_bytes - usable(self.host_bytes))

    def problem(self, memory: MemoryEstimate) -> str:
        """Text with needed and available bytes of each memory that is too small; empty where the run fits."""
        device = (memory.device_bytes, usable(self.device_bytes), "on its device")
        host = (memory.host_bytes, usable(self.host_bytes), "in its share of the host's memory")
        # A CPU rank computes in host memory, so only the limit of the host counts.
        limits = (host,) if memory.device == "host" else (device, host)
        texts = [
            f"{need / GIB:,.1f} GiB of {most / GIB:,.1f} GiB {where}" for need, most, where in limits if need > most
        ]
        return f"needs {' and '.join(texts)}" if texts else ""


_HIGHEST_STAGE = 3


class FittingChange(NamedTuple):
    """A change of the run file, as `KEY VALUE`, and the bytes that a rank's device would hold after the change."""

    text: str
    device_bytes: int


def _changed_keys(plan: Plan, rows: int) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield changes that may save memory, as (text, keys of the section `train`, keys of DeepSpeed's
    `zero_optimization`).
    """
    own = {"micro_batch_size": plan.micro_batch_size}
    if rows < plan.micro_batch_size:
        yield f"train.micro_batch_size {rows}", {"micro_batch_size": rows}, {}
    for stage in range(plan.zero_stage + 1, _HIGHEST_STAGE + 1 if plan.world.world_size > 1 else 0):
        yield f"zero_optimization.stage {stage}", own, {"stage": stage}
    if plan.activation_checkpointing != "full":
        yield "train.activation_checkpointing full", {**own, "activation_checkpointing": "full"}, {}
    if not plan.train.tiled_mlp:
        yield "train.tiled_mlp true", {**own, "tiled_mlp": True}, {}
    if plan.device == "cpu":
        return
    if not plan.train.activation_offload:
        on = {"activation_offload": True, "activation_checkpointing": "full"}
        yield "train.activation_offload true", {**own, **on}, {}
    if plan.offload_optimizer == "none":
        yield "offload_optimizer.device cpu", own, {"offload_optimizer": {"device": "cpu"}}
    if plan.offload_param == "none" and plan.zero_stage == _HIGHEST_STAGE:
        yield "offload_param.device cpu", own, {"offload_param": {"device": "cpu"}}


def fitting_changes(run: RunMemory, *, budget: int) -> tuple[FittingChange, ...]:
    """Single changes of the run file that leave enough of `budget` bytes free. Changes that cost least time come first.
    `make_plan` accepts each change, and no change affects the loss.
    """
    plan, rows, changes = run.plan, largest_micro_batch(run, budget=budget) or 1, list[FittingChange]()
    for text, train, zero in _changed_keys(plan, rows):
        updates: dict[str, Any] = {"train": plan.train.model_copy(update=train)}
        if zero:
            tree = read_choices(plan.deepspeed)[0] if plan.deepspeed else {}
            section = {**(tree.get("zero_optimization") or {"stage": plan.zero_stage}), **zero}
            updates["deepspeed"] = {**tree, "zero_optimization": section}
        with suppress(FinetuneError):
            changed = make_plan(replace(plan, **updates), world=plan.world, device=plan.device)
            need = run.with_plan(changed).estimate().device_bytes
            changes += [FittingChange(text, need)] if fits(need, budget) else []
    return tuple(changes)

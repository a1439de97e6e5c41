"""Compile the operators of a run before training, and let all ranks agree on the result."""

import json
import os
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import cache

import torch

from ds_finetune.console.phase_line import Say
from ds_finetune.engine.ops.deepspeed_ops import build_op, needed_ops
from ds_finetune.errors import ConfigError
from ds_finetune.plan.plan import Plan
from ds_finetune.system.world import World

Agree = Callable[[str], list[str]]
"""From this rank's text to the texts of all ranks, by rank; every rank calls it equally often."""
_BINDING_LAUNCHERS = ("srun", "mpirun")
"""Launchers that bind each rank to cores of its own."""


def build_ops(plan: Plan, agree: Agree, say: Say) -> Plan:
    """Compile what the optimizer and NVMe offload of `plan` need; ConfigError on every rank where some rank cannot.

    DeepSpeed's FusedAdam alone may be missing: where it cannot be compiled on some rank, the plan that is returned has
    torch's fused AdamW on all of them and a note, unless the user has set `torch_adam` to false.
    """
    problems = {name: _build_problem(name, say) for name in needed_ops(plan)}
    everywhere = [json.loads(text) for text in agree(json.dumps(problems))]
    for rank, (name, (problem, hint)) in ((r, item) for r, found in enumerate(everywhere) for item in found.items()):
        if problem and name == "fused_adam" and plan.may_take_torch_adam:
            return plan.with_torch_adam(f"On rank {rank}: {problem}")
        if problem:
            raise ConfigError(f"rank {rank}: {problem}", hint=hint)
    return plan


@cache
def _build_problem(name: str, say: Say) -> tuple[str, str]:
    """Why an operator cannot be built here, and a hint; both empty where it can. Tried once in a process."""
    try:
        build_op(name, say)
    except ConfigError as refused:
        return refused.message, refused.hint
    return "", ""


def use_cores(plan: Plan, environ: MutableMapping[str, str]) -> Plan:
    """Give an offloaded optimizer this rank's share of the host's cores, with a note in the plan that is returned.

    torchrun sets OMP_NUM_THREADS to 1 where it is not set; other launchers leave all cores to every rank. Any other
    value is the user's and stays.
    """
    given = environ.get("OMP_NUM_THREADS")
    is_default = given is None or (given == "1" and "TORCHELASTIC_RUN_ID" in environ)
    if plan.offload_optimizer == "none" or not is_default:
        return plan
    threads = cores_of_rank(plan.world, available=len(os.sched_getaffinity(0)), total=os.cpu_count() or 1)
    if str(threads) == given:
        return plan
    environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    note = (
        f"OMP_NUM_THREADS is {threads} (it was {given or 'not set'}): the optimizer is offloaded, and this is a "
        "rank's share of the cores"
    )
    return replace(plan, notes=(*plan.notes, note))


def cores_of_rank(world: World, *, available: int, total: int) -> int:
    """Cores of a rank: its part of those `available` here, or all of them where the launcher has bound it to some of
    `total`.
    """
    is_own = world.launcher in _BINDING_LAUNCHERS and available < total
    return available if is_own else max(1, available // world.local_world_size)

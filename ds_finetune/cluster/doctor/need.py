"""What a run needs of its hosts: a valid plan, operators, disk, memory, folders and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_finetune.cluster.hosts.check_result import Check, label
from ds_finetune.config.hostfile import Host
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import FinetuneError
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.system.world import World


@dataclass(frozen=True)
class Need:
    """The needs of a run: bytes of each rank in host memory and on its GPU, bytes that each host writes, operators."""

    rank_bytes: int
    gpu_bytes: int
    disk_bytes: Mapping[str, int]
    ops: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def folders_of(config: RunConfig | None) -> dict[str, str]:
    """Folders that hosts may share, by the key of the run file."""
    if config is None:
        return {"working folder": "."}
    return {"output_dir": config.output_dir, "data.cache_dir": config.data.cache_dir}


def files_of(config: RunConfig | None) -> tuple[str, ...]:
    """Files and folders that every host must have; files on the Hugging Face hub are not among them."""
    if config is None:
        return ()
    named = [config.model.path, config.model.tokenizer, *config.data.paths("train"), *config.data.paths("eval")]
    named += [getattr(config.objective, name, None) for name in ("teacher", "scores")]
    named += [config.deepspeed] if isinstance(config.deepspeed, str) else []
    return tuple(path for path in named if path and Path(path).exists())


def plan_of(config: RunConfig, hosts: Sequence[Host], device: str) -> Plan:
    """The plan of `config` on all slots of `hosts`; raises the FinetuneError that a run would raise before loading."""
    return make_plan(config, world=_world(hosts), device=device)


def _world(hosts: Sequence[Host]) -> World:
    slots = [host.slots for host in hosts]
    return World(0, sum(slots), 0, slots[0], "the doctor")


def need_of(config: RunConfig, hosts: Sequence[Host], device: str) -> tuple[Need | None, Check]:
    """What a run needs, and the check of its plan; None where the plan is refused."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        need, plan = _need(config, hosts, device)
    except FinetuneError as refused:
        return None, Check("plan", "", "fail", refused.message, refused.hint)
    return need, Check(
        "plan", "", "ok", f"{plan.mesh}, ZeRO-{plan.zero_stage}, {plan.world.world_size} ranks on {device}"
    )


def _need(config: RunConfig, hosts: Sequence[Host], device: str) -> tuple[Need, Plan]:
    from ds_finetune.engine.ops.deepspeed_ops import needed_ops
    from ds_finetune.trainer.resolve import resolve

    run = resolve(config, world=_world(hosts), device=device, is_config_only=True)
    estimate, plan = run.estimate, run.plan
    disks = {
        label(host): estimate.disk(ranks=host.slots, is_first_host=number == 0).num_bytes
        for number, host in enumerate(hosts)
    }
    return Need(estimate.host_bytes, estimate.gpu_bytes, disks, needed_ops(plan)), plan

"""What a run needs of its hosts: a valid plan, operators, disk, memory, folders and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import FinetuneError
from ds_finetune.hostfile import Host
from ds_finetune.hosts.check import Check, label
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.world import World


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
    """Files and folders that every host must have; those that a hub provides are not among them."""
    if config is None:
        return ()
    named = [config.model.path, config.model.tokenizer, *config.data.train, *config.data.eval]
    named += [config.deepspeed] if isinstance(config.deepspeed, str) else []
    return tuple(path for path in named if path and Path(path).exists())


def plan_of(config: RunConfig, hosts: Sequence[Host], device: str) -> Plan:
    """The plan of `config` on all slots of `hosts`; raises the FinetuneError that a run would raise before loading."""
    slots = [host.slots for host in hosts]
    return make_plan(config, world=World(0, sum(slots), 0, slots[0], "the doctor"), device=device)


def need_of(config: RunConfig, hosts: Sequence[Host], device: str) -> tuple[Need | None, Check]:
    """What a run needs, and the check of its plan; None where the plan is refused."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        plan = plan_of(config, hosts, device)
        need = _need(config, plan, hosts)
    except FinetuneError as refused:
        return None, Check("plan", "", "fail", refused.message, refused.hint)
    return need, Check(
        "plan", "", "ok", f"{plan.mesh}, ZeRO-{plan.zero_stage}, {plan.world.world_size} ranks on {device}"
    )


def _need(config: RunConfig, plan: Plan, hosts: Sequence[Host]) -> Need:
    from ds_finetune.engine.deepspeed_ops import needed_ops
    from ds_finetune.model.build import resolve_folder
    from ds_finetune.plan.model_shape import Shape
    from ds_finetune.trainer.dry_run import held_tensors, state_bytes
    from ds_finetune.trainer.inputs import config_tree, make_model_plan, token_limits
    from ds_finetune.trainer.run_dir import bytes_written

    model = make_model_plan(config, plan.mesh, is_config_alone=True)
    token_limits(config, model.hf_config)
    total = Shape.of(config_tree(resolve_folder(config.model.path, files=("*.json",)), model.hf_config)).total_params
    trained = total if model.lora is None else model.lora.num_params
    held = max(
        (held_tensors(plan, model, place) for place in range(plan.mesh.pp)),
        key=lambda part: sum(kind.numel for kind in part),
    )
    sizes = state_bytes(plan, held, model.lora)
    where = {"weights": plan.offload_param, "gradients": plan.offload_optimizer, "optimizer": plan.offload_optimizer}
    at_home = "cpu" if plan.device == "cpu" else "cuda"
    homes = {name: at_home if where[name] == "none" else where[name] for name in sizes}
    checkpoint = trained * plan.checkpoint_bytes_per_parameter if config.checkpoint.every_steps else 0
    copied = checkpoint // plan.world.world_size if plan.saves_asynchronously else 0
    return Need(
        rank_bytes=copied + sum(size for name, size in sizes.items() if homes[name] == "cpu"),
        gpu_bytes=sum(size for name, size in sizes.items() if homes[name] == "cuda"),
        disk_bytes=_disk(
            config, plan, hosts, checkpoint, lambda size: bytes_written(config, total, checkpoint_bytes=size)
        ),
        ops=needed_ops(plan),
    )


def _disk(
    config: RunConfig,
    plan: Plan,
    hosts: Sequence[Host],
    checkpoint: int,
    written: Any,  # noqa: ANN401
) -> dict[str, int]:
    """Rank zero's host writes the exports, and all checkpoints where the folder is one; else each host its ranks' share
    of those.
    """
    kept = config.checkpoint
    found = {}
    for number, host in enumerate(hosts):
        share = checkpoint * host.slots // plan.world.world_size if kept.node_local else checkpoint
        exports = written(0)
        found[label(host)] = written(share) if number == 0 else written(share) - exports if kept.node_local else 0
    return found

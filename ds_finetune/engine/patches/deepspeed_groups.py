"""DeepSpeed's registry of process groups (utils/groups.py), which lives as long as the process."""

from collections.abc import Sequence

import torch.distributed as dist

from ds_finetune.foreign.guard import Foreign

_REGISTRY = Foreign("deepspeed", "utils/groups.py:37-55")
_EXPERTS = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS")
_EXPERT_DATA = ("_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS")

Registered = tuple[dist.ProcessGroup | None, Sequence[Sequence[int]]]
"""A process group of this rank, and the ranks of every such group."""


def register_expert_groups(name: str, *, parts: Registered, same_part: Registered) -> None:
    """Register the groups of experts where DeepSpeed 0.19.8 looks for them by name (utils/groups.py:37-44).

    DeepSpeed's own functions make groups only for its own layouts. `parts` are ranks that together hold all experts,
    `same_part` ranks that hold the same ones.
    """
    from deepspeed.utils import groups

    for registries, values in ((_EXPERTS, parts), (_EXPERT_DATA, same_part)):
        for registry, value in zip(registries, values, strict=True):
            _REGISTRY.attribute(groups, registry)[name] = value


def unregister_expert_groups(name: str) -> None:
    """Remove the groups of experts, so that they can end with the engine.

    Not after an error: a group ends with its last reference, and its end waits for ranks that may be gone.
    """
    from deepspeed.utils import groups

    for registry in (*_EXPERTS, *_EXPERT_DATA):
        _REGISTRY.attribute(groups, registry).pop(name, None)


def forget_model_parallel_unit() -> None:
    """Drop the model parallel unit of the last engine, which DeepSpeed keeps (utils/groups.py:50)."""
    from deepspeed.utils import groups

    _REGISTRY.attribute(groups, "mpu")
    groups.mpu = None


def forget_groups() -> None:
    """Drop every process group that DeepSpeed keeps, which the next run of this process would otherwise use."""
    from deepspeed.utils import groups

    _REGISTRY.attribute(groups, "mesh_device")
    for name, value in list(vars(groups).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)
        elif name.startswith("_") and not name.startswith("__") and isinstance(value, dict):
            value.clear()
    groups.mesh_device = None

"""DeepSpeed's registry of process groups (utils/groups.py), which exists as long as the process."""

from collections.abc import Sequence

import torch.distributed as dist

from ds_finetune.foreign.guard import Foreign

_REGISTRY = Foreign("deepspeed", "utils/groups.py:37-55")
_EXPERTS = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS")
_EXPERT_DATA = ("_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS")

Registered = tuple[dist.ProcessGroup | None, Sequence[Sequence[int]]]
"""This rank's process group, and the lists of ranks of all groups of the same kind."""


def register_expert_groups(name: str, *, parts: Registered, same_shard: Registered) -> None:
    """Register the process groups of experts under the name by which DeepSpeed 0.19.8 looks them up
    (utils/groups.py:37-44). DeepSpeed's own functions create groups only for its own layouts. `parts` are ranks that
    together have all experts, `same_shard` ranks that have the same experts.
    """
    from deepspeed.utils import groups

    for registries, values in ((_EXPERTS, parts), (_EXPERT_DATA, same_shard)):
        for registry, value in zip(registries, values, strict=True):
            _REGISTRY.attribute(groups, registry)[name] = value


def unregister_expert_groups(name: str) -> None:
    """Remove the process groups of experts from the registry, so that they can be destroyed with the engine. It is not
    called after an error: a group is destroyed with its last reference, which waits for ranks that may have ended.
    """
    from deepspeed.utils import groups

    for registry in (*_EXPERTS, *_EXPERT_DATA):
        _REGISTRY.attribute(groups, registry).pop(name, None)


def forget_model_parallel_unit() -> None:
    """Drop the model parallel unit of the previous engine, which DeepSpeed keeps (utils/groups.py:50)."""
    from deepspeed.utils import groups

    _REGISTRY.attribute(groups, "mpu")
    groups.mpu = None


def forget_groups() -> None:
    """Drop all process groups that DeepSpeed keeps, because the next run of this process would use them."""
    from deepspeed.utils import groups

    _REGISTRY.attribute(groups, "mesh_device")
    for name, value in list(vars(groups).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)
        elif name.startswith("_") and not name.startswith("__") and isinstance(value, dict):
            value.clear()
    groups.mesh_device = None

"""Corrections of DeepSpeed's start, which compiles needlessly, replaces a torch function and changes weights. This
module also changes DeepSpeed's registry of process groups, which DeepSpeed keeps until the process ends.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _device

from ds_finetune.foreign.guard import Foreign, replaced

_SHARED_MEMORY = Foreign("deepspeed", "comm/torch.py:47-53, 207")
_DEVICE_FUNCTIONS = Foreign("torch", "utils/_device.py:10-58")
_ZERO_INIT = Foreign("deepspeed", "runtime/zero/partition_parameters.py:664, 409")


@contextmanager
def without_shared_memory_op() -> Iterator[None]:
    """Context in which `deepspeed.init_distributed` does not compile its shared-memory op, which only inference uses.
    The compilation would take two minutes on a CPU. Before it, DeepSpeed would also compile a program for each of its
    operators to find out which ones it can build.
    """
    # The module is imported by name: `from deepspeed.comm import torch` would give torch itself.
    backend = importlib.import_module("deepspeed.comm.torch")
    _SHARED_MEMORY.source(_SHARED_MEMORY.attribute(backend, "build_shm_op"), "return None")
    with replaced(backend, "build_shm_op", lambda: None):
        yield


@contextmanager
def zero_init(config: Mapping[str, Any], **groups: object) -> Iterator[None]:
    """Context of `deepspeed.zero.Init` in which `torch.arange` is torch's own. Parameters created in it are partitioned
    over `data_parallel_group` at once; `groups` are DeepSpeed's arguments `data_parallel_group` and `mpu`. DeepSpeed
    replaces `torch.arange` by one with results of another dtype, which would round the rotary frequencies to bf16. No
    `dtype` is passed, because without fp16 support DeepSpeed ignores it and uses bf16 (operator precedence, line 409).
    """
    import deepspeed

    _ZERO_INIT.parameters(deepspeed.zero.Init.__init__, "config_dict_or_path", *groups)
    # torch caches once per process which functions take the device of a `torch.device(...)` context (2.13,
    # utils/_device.py:10-58). The cache must be filled before `arange` is replaced. Otherwise it would lack arange, and
    # later ranges would be on the CPU.
    _DEVICE_FUNCTIONS.attribute(_device, "_device_constructors")()
    arange = torch.arange
    try:
        with deepspeed.zero.Init(config_dict_or_path=config, **groups):
            torch.arange = arange
            yield
    finally:
        torch.arange = arange


_SECOND_COPY = Foreign("deepspeed", "runtime/zero/partition_parameters.py:1308, 1900, 1338")
_FLAT = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:263, 889; zenflow/zenflow_utils.py:20")


def forget_second_copies(module: nn.Module) -> None:
    """Drop the secondary copies of weights that hierarchical partitioning keeps, so that the next forward makes new
    copies. DeepSpeed makes them when a parameter is first partitioned, before its weights are loaded, and gathers from
    them until a step drops them. So the first forward would use the values from before the weights were loaded.
    """
    for param in module.parameters():
        if hasattr(param, "ds_id"):
            _SECOND_COPY.attribute(param, "ds_secondary_tensor")
            param.ds_secondary_tensor = None  # type: ignore[attr-defined]


@contextmanager
def zenflow_keeps_matrices() -> Iterator[None]:
    """Context in which 2-D weights of a model under ZenFlow at stages 1 and 2 keep their values. ZenFlow copies the
    transposed matrices of a group into one flat tensor, but then views each parameter as if it had not been transposed,
    which scrambles every matrix: the loss of a pre-trained model was 18.9 instead of 7.0.
    """
    from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
    from deepspeed.runtime.zenflow.zenflow_utils import _flatten_dense_tensors

    plain = _FLAT.attribute(ZenFlowZeroOptimizer, "_update_model_bit16_weights")
    _FLAT.source(plain, "p.data = flat_group.narrow(0, offset, meta.numel()).view(meta.shape).data")
    _FLAT.source(_flatten_dense_tensors, "t.transpose(0, 1).contiguous() if t.dim() == 2 else t")

    def update(optimizer: Any, group_index: int) -> None:  # noqa: ANN401
        plain(optimizer, group_index)
        # The elements are those of the transposed matrix, so view them in its shape and transpose back.
        for param in optimizer.bit16_groups[group_index]:
            if param.dim() == 2:
                rows, columns = param.shape
                param.data = param.data.view(columns, rows).t()

    with replaced(ZenFlowZeroOptimizer, "_update_model_bit16_weights", update):
        yield


_REGISTRY = Foreign("deepspeed", "utils/groups.py:37-55")
_EXPERTS = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS")
_EXPERT_DATA = ("_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS")

Registered = tuple[dist.ProcessGroup | None, Sequence[Sequence[int]]]
"""This rank's process group of one kind, and the lists of ranks of all groups of this kind."""


def register_expert_groups(name: str, *, parts: Registered, same_shard: Registered) -> None:
    """Register the process groups of experts under the name by which DeepSpeed 0.19.8 looks them up
    (utils/groups.py:37-44). DeepSpeed's own functions create groups only for its own layouts. The ranks of `parts`
    together have all experts; the ranks of `same_shard` have the same experts.
    """
    from deepspeed.utils import groups

    for registries, values in ((_EXPERTS, parts), (_EXPERT_DATA, same_shard)):
        for registry, value in zip(registries, values, strict=True):
            _REGISTRY.attribute(groups, registry)[name] = value


def unregister_expert_groups(name: str) -> None:
    """Remove the process groups of experts from the registry, so that they can be destroyed with the engine. After an
    error they stay there, because destroying a group waits for its other ranks, which may have ended.
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

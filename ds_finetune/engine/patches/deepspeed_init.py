"""DeepSpeed's start: what it would compile, a torch function that it replaces, and weights that it would change."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _device

from ds_finetune.foreign.guard import Foreign, replaced

_SHARED_MEMORY = Foreign("deepspeed", "comm/torch.py:47-53, 207")
_DEVICE_FUNCTIONS = Foreign("torch", "utils/_device.py:10-58")
_ZERO_INIT = Foreign("deepspeed", "runtime/zero/partition_parameters.py:664, 409")


@contextmanager
def without_shared_memory_op() -> Iterator[None]:
    """While this is open `deepspeed.init_distributed` does not compile its shared-memory op.

    That takes two minutes on a CPU, and only inference uses it. DeepSpeed would also compile a program for each of its
    operators to learn which of them it can build.
    """
    # `from deepspeed.comm import torch` would give torch itself.
    backend = importlib.import_module("deepspeed.comm.torch")
    _SHARED_MEMORY.source(_SHARED_MEMORY.attribute(backend, "build_shm_op"), "return None")
    with replaced(backend, "build_shm_op", lambda: None):
        yield


@contextmanager
def zero_init(config: Mapping[str, Any], **groups: object) -> Iterator[None]:
    """`deepspeed.zero.Init` with torch's own `arange`; `groups` are its `data_parallel_group` and `mpu`.

    Parameters made inside are partitioned over `data_parallel_group` at once. DeepSpeed replaces `torch.arange` by one
    that changes its dtype, which would round the rotary frequencies to bf16. No `dtype` is passed: without fp16
    support DeepSpeed ignores it and takes bf16 (operator precedence, line 409).
    """
    import deepspeed

    _ZERO_INIT.parameters(deepspeed.zero.Init.__init__, "config_dict_or_path", *groups)
    # torch looks up once in a process which functions `torch.device(...)` as a context gives its device to (2.13,
    # utils/_device.py:10-58). Looked up while arange is replaced, later ranges would be on the CPU in every context.
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
    """Drop the copies of weights that hierarchical partitions keep, so that the next forward makes new ones.

    DeepSpeed makes them when a parameter is first partitioned, before weights are loaded into its partition, and
    gathers from them until a step drops them: the first forward would compute with the values of an unloaded model.
    """
    for param in module.parameters():
        if hasattr(param, "ds_id"):
            _SECOND_COPY.attribute(param, "ds_secondary_tensor")
            param.ds_secondary_tensor = None  # type: ignore[attr-defined]


@contextmanager
def zenflow_keeps_matrices() -> Iterator[None]:
    """While this is open, the matrices of a model under ZenFlow at stages 1 and 2 keep their values.

    It joins the transposed matrices of a group to one flat tensor and then takes each parameter to be the elements in
    their former order, which scrambles every matrix: the loss of a pre-trained model was 18.9 instead of 7.0.
    """
    from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
    from deepspeed.runtime.zenflow.zenflow_utils import _flatten_dense_tensors

    plain = _FLAT.attribute(ZenFlowZeroOptimizer, "_update_model_bit16_weights")
    _FLAT.source(plain, "p.data = flat_group.narrow(0, offset, meta.numel()).view(meta.shape).data")
    _FLAT.source(_flatten_dense_tensors, "t.transpose(0, 1).contiguous() if t.dim() == 2 else t")

    def update(optimizer: Any, group_index: int) -> None:  # noqa: ANN401
        plain(optimizer, group_index)
        # The parameters are now contiguous views of their elements, in the order of the transposed matrix.
        for param in optimizer.bit16_groups[group_index]:
            if param.dim() == 2:
                rows, columns = param.shape
                param.data = param.data.view(columns, rows).t()

    with replaced(ZenFlowZeroOptimizer, "_update_model_bit16_weights", update):
        yield

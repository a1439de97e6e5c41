"""DeepSpeed's start: an operator that it would compile, and a torch function that it replaces."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
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

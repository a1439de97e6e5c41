"""Where DeepSpeed keeps the part of a parameter that belongs to this rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.model.build import Fragment, in_memory, whole


def partition(param: torch.Tensor) -> Fragment:
    """This rank's slice of a ZeRO-3 parameter: `ds_tensor`, one of equal flat pieces (DeepSpeed 0.19.8,
    zero/partition_parameters.py).

    A slice on NVMe is brought into one of the swapper's buffers while it is open and written back when it closes. A
    parameter that ZeRO-3 does not know lives here whole.
    """
    if not hasattr(param, "ds_tensor"):
        return whole(param)
    held: Any = param
    numel, shape = int(held.ds_tensor.ds_numel), tuple(held.ds_shape)
    start = dist.get_rank(held.ds_process_group) * numel
    if is_swapped(param):
        return Fragment(start, numel, shape, lambda: _swapped_in(held))
    return in_memory(held.ds_tensor.data.view(-1), start=start, shape=shape)


def is_swapped(param: torch.Tensor) -> bool:
    """Whether this parameter's slice lives on NVMe; slices below one aio block stay in memory
    (swap_tensor/partitioned_param_swapper.py:135).
    """
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    partition = getattr(param, "ds_tensor", None)
    return partition is not None and partition.status == PartitionedParamStatus.NOT_AVAILABLE


@contextmanager
def _swapped_in(param: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - a parameter with ZeRO-3's attributes
    swapper = param.nvme_swapper
    swapper.swap_in([param], async_op=False)
    try:
        yield param.ds_tensor.data.view(-1)
    finally:
        # Synchronous; also gives the buffer back and marks the slice as not in memory.
        swapper.swap_out_and_release([param])

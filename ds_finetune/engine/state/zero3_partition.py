"""This rank's part of a ZeRO-3 parameter: in memory, or on NVMe."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.model.build.skeleton import Fragment, in_memory, whole


def partition(param: torch.Tensor) -> Fragment:
    """This rank's slice of a ZeRO-3 parameter: `ds_tensor`, one of equal flat pieces (DeepSpeed 0.19.8,
    zero/partition_parameters.py).

    A slice on NVMe is read into one of the swapper's buffers while it is open, and written back when it closes. A
    parameter that ZeRO-3 does not partition is whole on this rank.
    """
    if not hasattr(param, "ds_tensor"):
        return whole(param)
    zero_param: Any = param
    numel, shape = int(zero_param.ds_tensor.ds_numel), tuple(zero_param.ds_shape)
    start = dist.get_rank(zero_param.ds_process_group) * numel
    if is_swapped(param):
        return Fragment(start, numel, shape, lambda: _swap_in(zero_param))
    return in_memory(zero_param.ds_tensor.data.view(-1), start=start, shape=shape)


def is_swapped(param: torch.Tensor) -> bool:
    """Whether this parameter's slice is on NVMe; slices smaller than one aio block stay in memory
    (swap_tensor/partitioned_param_swapper.py:135).
    """
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    partition = getattr(param, "ds_tensor", None)
    return partition is not None and partition.status == PartitionedParamStatus.NOT_AVAILABLE


@contextmanager
def _swap_in(param: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - a parameter with ZeRO-3's attributes
    swapper = param.nvme_swapper
    swapper.swap_in([param], async_op=False)
    try:
        yield param.ds_tensor.data.view(-1)
    finally:
        # Synchronous; also releases the buffer and marks the slice as not in memory.
        swapper.swap_out_and_release([param])

"""The accelerator and the process group, opened as DeepSpeed needs them."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ds_finetune.world import World

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits in a collective for the others."""


def choose_device() -> str:
    """`cuda` where a GPU is seen and `DS_ACCELERATOR` does not say otherwise, else `cpu`; tells DeepSpeed the same."""
    wanted = os.environ.get("DS_ACCELERATOR")
    device = "cuda" if torch.cuda.is_available() and wanted in (None, "cuda") else "cpu"
    os.environ["DS_ACCELERATOR"] = device
    return device


@contextmanager
def process_group(world: World, device: str) -> Iterator[None]:
    """Open the default process group of `world` (NCCL on GPUs, gloo otherwise) and close it at the end.

    No engine may be referred to when it closes: what holds a group keeps its threads alive, and one that lets go of its last
    tensor while Python ends aborts a process whose work is done ("terminate called without an active exception", exit code -6).
    """
    import deepspeed

    world.export_to(os.environ)
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    else:
        # Without this, init_distributed compiles an op for two minutes that only inference uses (DeepSpeed 0.19.8, comm/torch.py:47).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", auto_mpi_discovery=False, timeout=COLLECTIVE_TIMEOUT, verbose=False)
    try:
        yield
    except BaseException:
        # The other ranks may never answer, so nothing here waits for them.
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    _forget_groups()
    gc.collect()


def _forget_groups() -> None:
    """Let go of the groups that DeepSpeed keeps for the life of the process (0.19.8, utils/groups.py:37)."""
    from deepspeed.utils import groups

    for name, value in list(vars(groups).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)
        elif name.startswith("_") and not name.startswith("__") and isinstance(value, dict):
            value.clear()
    groups.mesh_device = None


def everyones(mine: T) -> list[T]:
    """A plain value of every rank, by rank."""
    found: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def largest(*mine: float) -> list[float]:
    """The largest of each value over all ranks; cheap enough for every step."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    values = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()

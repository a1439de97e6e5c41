"""The accelerator and the process group, opened as DeepSpeed needs them."""

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
    """Open the default process group of `world` (NCCL on GPUs, gloo otherwise) and close it at the end."""
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
    finally:
        # After a failure the other ranks may never answer, so nothing here waits for them.
        dist.destroy_process_group()


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

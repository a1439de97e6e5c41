"""Small collectives of numbers and objects over all ranks."""

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def all_gather_object(value: T) -> list[T]:
    """Gather an object from every rank, in order of ranks. Objects are pickled."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_gather_scalar(value: float) -> list[float]:
    """Gather a number from every rank, in order of ranks, without pickling."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=collective_device())
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()


def all_reduce_max(*own_values: float) -> list[float]:
    """Maximum of each value over all ranks. It is cheap enough for every step."""
    values = torch.tensor(own_values, dtype=torch.float64, device=collective_device())
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def collective_device() -> str:
    """Device type of the tensors that collectives need: `cuda` with NCCL, else `cpu`."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"

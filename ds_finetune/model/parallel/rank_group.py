"""Process groups through which parallel modules communicate."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class RankGroup:
    """Ranks that each have a shard of the same tensors, layers or rows. This process has shard number `group_rank`."""

    group: dist.ProcessGroup | None
    """The torch process group; None after `close`."""
    size: int
    group_rank: int

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum `partial` over all ranks. The result is a new tensor without gradient."""
        total = partial.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def close(self) -> None:
        """Drop the reference to the process group, so that it can be destroyed while modules refer to this object."""
        self.group = None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, ranks: RankGroup) -> torch.Tensor:  # noqa: ANN401
        return ranks.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return grad, None


def sum_over_ranks(partial: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """Sum `partial` over all ranks. In backward each rank gets the gradient of the sum unchanged."""
    return _SumOverRanks.apply(partial, ranks)  # type: ignore[no-any-return]

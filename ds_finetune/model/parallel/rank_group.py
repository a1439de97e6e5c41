"""The process-group handle that parallel modules hold."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class RankGroup:
    """The ranks that hold equal shards of a tensor, of layers or of rows; this one holds shard `group_rank`."""

    group: dist.ProcessGroup | None
    """None after `close`."""
    size: int
    group_rank: int
    """Rank of this process within the group."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in a new tensor; no gradient."""
        total = partial.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def close(self) -> None:
        """Drop the reference to the process group; modules may still refer to this object."""
        self.group = None

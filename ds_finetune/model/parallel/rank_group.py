"""A process group, as the modules of a parallel model use it."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class RankGroup:
    """The ranks that hold equal shards of something; this one holds shard number `rank` of `size`."""

    group: dist.ProcessGroup | None
    """None after `close`."""
    size: int
    rank: int
    """Rank within the group."""

    def close(self) -> None:
        """Drop the reference to the process group; modules may still refer to this object."""
        self.group = None

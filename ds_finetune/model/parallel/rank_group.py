"""Ranks that share something of a model, as its modules know them."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class RankGroup:
    """Ranks that hold equal parts of something; rank number `place` of `size` holds that part. Without `group` once it
    is closed.
    """

    group: dist.ProcessGroup | None
    size: int
    place: int

    def close(self) -> None:
        """Let go of the process group, whatever still refers to this."""
        self.group = None

"""Jobs that a rank sends to its writer process (part_writer_process.py) over a pipe, and their replies.

The writer process imports this module, so it does not import torch.
"""

from dataclasses import dataclass
from pathlib import Path

from ds_finetune.checkpoint.commit import CommitJob


@dataclass(frozen=True)
class ReserveJob:
    """Allocate `num_bytes` of shared memory in advance."""

    num_bytes: int


@dataclass(frozen=True)
class WriteJob:
    """Write the first `num_bytes` of shared memory to the file `part`, then run `commit` where it is given."""

    part: Path
    num_bytes: int
    commit: CommitJob | None


@dataclass(frozen=True)
class RemoveJob:
    """Remove checkpoints."""

    folders: list[Path]


class StopWaiting:
    """End a commit that waits for the parts of other ranks, one of which has failed. There is no reply."""


Job = ReserveJob | WriteJob | RemoveJob


@dataclass(frozen=True)
class JobDone:
    """Reply to a job of the class `job`, with its error if there was one."""

    job: type[Job]
    error: str

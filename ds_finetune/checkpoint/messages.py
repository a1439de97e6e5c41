"""Jobs that a rank sends over a pipe to its writer process (part_writer_process.py), and the replies to jobs.

The writer process imports this module, so it does not import torch.
"""

from dataclasses import dataclass
from pathlib import Path

from ds_finetune.checkpoint.commit import CommitJob


@dataclass(frozen=True)
class ReserveJob:
    """Job: allocate `num_bytes` of shared memory in advance."""

    num_bytes: int


@dataclass(frozen=True)
class WriteJob:
    """Job: write `num_bytes` of shared memory to the file `part`, then complete the checkpoint if `commit` is given."""

    part: Path
    num_bytes: int
    commit: CommitJob | None


@dataclass(frozen=True)
class RemoveJob:
    """Job: remove the checkpoints `folders`."""

    folders: list[Path]


class StopWaiting:
    """Message: stop waiting for the parts of other ranks, one of which has failed. There is no reply."""


Job = ReserveJob | WriteJob | RemoveJob


@dataclass(frozen=True)
class JobDone:
    """Reply of the writer process to a job of the class `job`. `error` is empty if the job succeeded."""

    job: type[Job]
    error: str

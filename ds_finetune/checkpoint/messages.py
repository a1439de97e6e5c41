"""Jobs that a rank sends to its writer process (part_writer_process.py), and their replies.

The writer process imports this module, so it does not import torch.
"""

from dataclasses import dataclass

from ds_finetune.checkpoint.commit import Manifest
from ds_finetune.system.process_messages import ProcessMessage


@dataclass(frozen=True)
class CommitJob:
    """Complete the checkpoint in the folder `partial` once every part is written (`commit.commit`).

    `manifest` has no files yet. `texts` maps names of new files to contents, and `linked` maps names to paths of
    existing files.
    """

    partial: str
    manifest: Manifest
    texts: dict[str, str]
    linked: dict[str, str]


class ReserveJob(ProcessMessage, kind="reserve"):
    """Allocate `num_bytes` of shared memory in advance."""

    num_bytes: int


class WriteJob(ProcessMessage, kind="write"):
    """Write the first `num_bytes` of shared memory to the file `part`, then run `commit` where it is given."""

    part: str
    num_bytes: int
    commit: CommitJob | None


class RemoveJob(ProcessMessage, kind="remove"):
    """Remove checkpoints."""

    folders: list[str]


class StopWaiting(ProcessMessage, kind="stop_waiting"):
    """End a commit that waits for the parts of other ranks, one of which has failed. There is no reply."""


class JobDone(ProcessMessage, kind="done"):
    """Reply to a job of kind `job`, with its error if there was one."""

    job: str
    error: str


JOBS: tuple[type[ProcessMessage], ...] = (ReserveJob, WriteJob, RemoveJob, StopWaiting)

"""File names of the logs of a launched run's ranks."""

from pathlib import Path

RUN_ID = "DS_FINETUNE_RUN_ID"
"""Environment variable of every rank with the id of the run, which is also the name of the run's log folder."""


def logs_folder(output_dir: str, run_id: str) -> Path:
    """Folder of the logs of a run's ranks, on each host."""
    return Path(output_dir) / "logs" / run_id


def log_name(rank: int) -> str:
    """File name of a rank's log."""
    return f"rank-{rank:05d}.log"

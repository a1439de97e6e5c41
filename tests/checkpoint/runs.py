"""Runs of the program that are watched, signalled and killed from outside."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from ds_finetune.runs.metrics import read_expert_table
from tests.forks import Forkserver

SECONDS = 400
NUMBERS = (
    "train/loss",
    "train/grad_norm",
    "train/accuracy",
    "optim/lr",
    "data/tokens_seen",
    "data/supervised_tokens",
    "train/skipped_steps",
    "train/balance_loss",
)
"""What must be the same bits in a run that was interrupted."""


class Running:
    """A started run; `ranks` are its processes by rank."""

    started: ClassVar[list["Running"]] = []

    def __init__(self, run_file: Path, *overrides: str, ranks: int = 2) -> None:
        self.folder = run_file.parent / "run"
        self.log = run_file.parent / f"log-{time.time_ns()}.txt"
        self._began = time.time_ns()
        environ = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        }
        environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        program = ["ds_finetune/train.py", str(run_file), *overrides]
        self.process = Forkserver.get().start(
            program, environ, ranks=ranks if ranks > 1 else 0, out=self.log, err=self.log
        )
        self.started.append(self)

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self.log.read_text()

    @property
    def steps(self) -> int:
        """Steps in its metrics."""
        file = self.folder / "metrics.jsonl"
        return sum(line.endswith("}\n") for line in file.read_text().splitlines(keepends=True)) if file.exists() else 0

    @property
    def has_written(self) -> bool:
        """Whether the metrics are this start's; until then they hold steps that the one before took and did not save."""
        file = self.folder / "metrics.jsonl"
        return file.exists() and file.stat().st_mtime_ns > self._began

    def ranks(self) -> list[int]:
        """Process ids of the ranks, by rank."""
        return self.process.ranks() or ([self.process.pid] if self.process.poll() is None else [])

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; fails where the run ends before."""
        until = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, self.text[-4000:]
            assert time.monotonic() < until, self.text[-4000:]
            time.sleep(0.01)

    def finish(self) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout=SECONDS)

    def kill(self) -> None:
        """End every process of the run at once; torchrun gives each rank a session of its own."""
        self.process.kill()
        self.finish()


def numbers(folder: Path) -> list[dict[str, Any]]:
    """What must be equal, of each step; with the loads of experts from their table, which has each step once."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    _, table = read_expert_table(folder / "experts.jsonl")
    assert table["step"].tolist() == [record["step"] for record in records]
    return [
        {name: value for name, value in record.items() if name in ("step", *NUMBERS) or name.startswith("router/")}
        | {"counts": counts.tolist(), "entropy": entropy.tolist()}
        for record, counts, entropy in zip(records, table["counts"], table["entropy"], strict=True)
    ]

"""`train` with a slow loader on one rank, whose clock is ahead, and a record of what is wrapped during each step:
SLOW_RANK SECONDS SHIFT_SECONDS RUN.yaml [section.key=value ...].
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ds_finetune.cli.main import run_and_exit
from ds_finetune.data.batches import Batch
from ds_finetune.engine.engine import Engine
from ds_finetune.observers.record import StepRecord
from ds_finetune.runs.timeline.profiler import HostClock
from ds_finetune.trainer import profiling, train
from ds_finetune.trainer.observers import StartedRun
from ds_finetune.trainer.prepare import PreparedRun


class Watch:
    """Notes after each step whether a profiler runs, and which methods are wrapped."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine, self._path, self._lines = engine, path, list[str]()
        self._group_methods = vars(dist.ProcessGroup)["allreduce"]

    def after_step(self, record: StepRecord) -> StepRecord:
        wrapped = [name for name in ("step", "_forward", "evaluate") if name in vars(self._engine)]
        wrapped += [name for name in ("backward",) if name in vars(self._engine._ds)]
        wrapped += ["allreduce"] * (vars(dist.ProcessGroup)["allreduce"] is not self._group_methods)
        wrapped += ["profiler"] * torch.autograd.profiler._is_profiler_enabled
        self._lines.append(json.dumps({"step": record.step, "wrapped": wrapped}))
        return record

    def close(self) -> None:
        self._path.write_text("\n".join(self._lines))


def main() -> None:
    slow_rank, seconds, shift = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    rank = int(os.environ.get("RANK", "0"))
    batches_ahead, make_observers = train.batches_ahead, train.make_observers

    @contextmanager
    def late_batches(run: PreparedRun, engine: Engine, **where: object) -> Iterator[Iterator[Batch]]:
        """They arrive late however far ahead they are made."""
        with batches_ahead(run, engine, **where) as batches:  # type: ignore[arg-type]
            yield (_late(batch, seconds) for batch in batches)

    def watched(started: StartedRun, *others: object) -> list[object]:
        watch = Watch(started.engine, started.run.output_dir.parent / f"wrapped-{rank}.jsonl")
        return [*make_observers(started, *others), watch]  # type: ignore[arg-type]

    train.make_observers = watched  # type: ignore[assignment]
    if rank == slow_rank:
        train.batches_ahead = late_batches  # type: ignore[assignment]
        profiling.HostClock = partial(HostClock, "another host", int(shift * 1e9))  # type: ignore[assignment,misc]
    run_and_exit(["train", *sys.argv[4:]])


def _late(batch: Batch, seconds: float) -> Batch:
    time.sleep(seconds)
    return batch


if __name__ == "__main__":
    main()

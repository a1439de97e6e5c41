"""What watching costs: `torchrun --nproc-per-node 2 tests/cluster/watchdog/cost_worker.py RUN.yaml [section.key=value ...]`
prints it on rank zero: what a collective takes more, and what the kernel counts for the threads of the watchdog.
"""

import sys
import threading
import time
from pathlib import Path

from ds_finetune.cli.main import run_and_exit
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.engine.engine import Engine

CALLS = 200_000


def main() -> None:
    """Train, and print at the last step."""
    original, count = Engine.step, 0
    steps = int(next(each for each in sys.argv if each.startswith("train.for=")).split("=")[1].split()[0])
    began = 0.0

    def timed(self: Engine, *args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        nonlocal count, began
        if count == 0:
            began = time.monotonic()
        count += 1
        result = original(self, *args, **kwargs)
        if self.is_rank_zero and count == steps:
            _print(time.monotonic() - began)
        return result

    Engine.step = timed  # type: ignore[method-assign]
    run_and_exit(["train", *sys.argv[1:]])


def _print(wall: float) -> None:
    sys.stderr.write(f"a collective {_a_call() * 1e6:.2f} us more\n")
    for thread in threading.enumerate():
        if thread.name.startswith("watchdog"):
            nanoseconds = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
            sys.stderr.write(f"{thread.name}: {nanoseconds / 1e9 / wall:.3%} of a core over {wall:.0f} s\n")


def _a_call() -> float:
    progress = RankProgress(0, WatchdogConfig())
    start = time.process_time()
    for _ in range(CALLS):
        with progress.collectives.record("all_reduce", 8, "all"):
            pass
    return (time.process_time() - start) / CALLS


if __name__ == "__main__":
    main()

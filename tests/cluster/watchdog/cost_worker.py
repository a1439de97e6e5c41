"""What watching costs: `torchrun --nproc-per-node 2 tests/cluster/watchdog/cost_worker.py RUN.yaml [section.key=value ...]`
prints it on rank zero.

Blocks of steps with collectives seen and not seen take turns in one run; the thread's own time is what the kernel
counts for it.
"""

import statistics
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ds_finetune.cli.main import run_and_exit
from ds_finetune.cluster.watchdog.collectives import _COLLECTIVES, _SEND_RECEIVE, _wrap_collective
from ds_finetune.cluster.watchdog.progress import HangLimits, RankProgress
from ds_finetune.engine.engine import Engine

BLOCK, CALLS = 10, 200_000
NAMES = (*_COLLECTIVES, *_SEND_RECEIVE)


def main() -> None:
    """Train, and print at the end."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    original, count = Engine.step, 0
    began = 0.0

    def timed(self: Engine, *args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        nonlocal count, began
        if count == 0:
            began = time.monotonic()
        is_on = count // BLOCK % 2 == 0
        if count % BLOCK == 0:
            _switch(is_on=is_on)
        count += 1
        start = time.perf_counter()
        result = original(self, *args, **kwargs)
        if count > BLOCK * 2:
            seconds[is_on].append(time.perf_counter() - start)
        if self.is_rank_zero and count == self.total_steps:  # type: ignore[attr-defined]
            _print(seconds, time.monotonic() - began)
        return result

    Engine.step = timed  # type: ignore[method-assign]
    Engine.total_steps = int(next(each for each in sys.argv if each.startswith("train.for=")).split("=")[1].split()[0])  # type: ignore[attr-defined]
    run_and_exit(["train", *sys.argv[1:]])


SEEN: dict[str, object] = {}


def _switch(*, is_on: bool) -> None:
    for name in NAMES:
        SEEN.setdefault(name, getattr(dist, name))
        setattr(dist, name, SEEN[name] if is_on else SEEN[name].__wrapped__)  # type: ignore[attr-defined]


def _print(seconds: dict[bool, list[float]], wall: float) -> None:
    on, off = (statistics.median(seconds[which]) for which in (True, False))
    own = {thread.name: _cpu_seconds(thread) for thread in threading.enumerate() if thread.name.startswith("watchdog")}
    sys.stderr.write(
        f"step {on * 1e3:.2f} ms seen, {off * 1e3:.2f} ms not: {on / off:.4f}; a collective {_a_call() * 1e6:.2f} us more\n"
    )
    sys.stderr.write("".join(f"{name}: {used / wall:.3%} of a core over {wall:.0f} s\n" for name, used in own.items()))


def _cpu_seconds(thread: threading.Thread) -> float:
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def _a_call() -> float:
    def nothing(tensor: torch.Tensor, op: object = None, group: object = None, async_op: bool = False) -> None:
        pass

    seen, tensor = (
        _wrap_collective(RankProgress(0, HangLimits(1, 1, 1)), "all_reduce", nothing, is_point_to_point=False),
        torch.zeros(8),
    )
    times = []
    for function in (seen, nothing):
        start = time.perf_counter()
        for _ in range(CALLS):
            function(tensor, group=None)
        times.append((time.perf_counter() - start) / CALLS)
    return times[0] - times[1]


if __name__ == "__main__":
    main()

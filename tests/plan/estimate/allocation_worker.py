"""Take two steps of each cell, and write what torch's allocator gave this rank at most.

Started by the tests as `torchrun --nproc-per-node 2 allocation_worker.py FOLDER NAMES.json`.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import numpy as np
import torch
from torch._C._profiler import _EventType
from torch.distributed import Work
from torch.profiler import ProfilerActivity, profile

from ds_finetune.cli.main import exit_process
from ds_finetune.data.batches import training_batches
from ds_finetune.data.prepared_rows import Row
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.compare import batch_plan
from ds_finetune.system.world import World
from tests.plan.estimate.allocated_cells import DEFAULT, OTHERS, AllocationCell
from tests.plan.toys import toys_registered
from tests.planning import model_of

STEPS = 2
PAUSE_SECONDS = 0.003


def let_threads_release() -> None:
    """After each collective give the thread of gloo time to drop its tensors, so that this thread frees them last: the
    profiler sees only what this thread frees. A gather ends before the next begins: how many buffers gloo has at once
    would else depend on time, which changes the peak of a run with adapters by a tenth.
    """
    wait, gather = Work.wait, torch.distributed.all_gather_into_tensor

    def finished(*given: Any, **named: Any) -> Any:
        work = gather(*given, **named)
        if work is not None:
            work.wait()
        return work

    torch.distributed.all_gather_into_tensor = finished

    def patient(work: Work, *args: Any) -> Any:
        done = wait(work, *args)
        time.sleep(PAUSE_SECONDS)
        return done

    Work.wait = patient  # type: ignore[method-assign,assignment]


def main() -> None:
    """Run every cell; each rank writes its own results."""
    let_threads_release()
    folder, names = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    world = World.from_environment(os.environ)
    with process_group(world, choose_device()), toys_registered():
        for cell in (*DEFAULT, *OTHERS):
            if cell.name in names:
                found = _measured(cell, world, folder / cell.name)
                (folder / cell.name / f"rank{world.rank}.json").write_text(json.dumps(found))
                gc.collect()


def _measured(cell: AllocationCell, world: World, folder: Path) -> dict[str, int]:
    """Bytes that torch's allocator gave at most while the engine was built, and while two steps were taken."""
    config = cell.config(folder)
    plan, model = make_plan(RunSettings.of(config), world=world, device="cpu"), model_of(config)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        start_engine(plan, model) as engine,
    ):
        began = time.time_ns()
        take_full_steps(engine)
        ended = time.time_ns()
    assert profiler.profiler is not None
    return peaks(profiler.profiler.kineto_results.experimental_event_tree(), began, ended)


def take_full_steps(engine: Engine) -> None:
    """Steps on rows that are full, of one document each, with all tokens supervised."""
    tokens = engine.plan.train.max_seq_len
    plan = replace(batch_plan(engine.plan), row_len=tokens)
    rows = [_row(tokens) for _ in range(plan.global_batch_size * STEPS)]
    for batch in training_batches(rows, plan, start_step=0, total_rows=len(rows)):
        engine.step(batch, lr=1e-4)


def _row(tokens: int) -> Row:
    ids = np.arange(1, tokens + 1, dtype=np.int32)
    return Row(ids, np.arange(tokens, dtype=np.int32), ids, tokens)


def peaks(tree: Sequence[Any], began: int, ended: int) -> dict[str, int]:
    """The most bytes held before and between two times in ns.

    What a thread of gloo frees is not in the profile: an address that is given again was free.
    """
    live: dict[int, int] = {}
    held, found = 0, {"start": 0, "steps": 0}
    for when, pointer, size in sorted(_changes(tree)):
        held += max(size, 0) - live.pop(pointer, 0)
        if size > 0:
            live[pointer] = size
        name = "start" if when < began else "steps"
        found[name] = max(found[name], held) if when <= ended else found[name]
    return found


def _changes(tree: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Time in ns, address and bytes of each allocation; bytes below zero where one is freed."""
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size


if __name__ == "__main__":
    main()
    exit_process()

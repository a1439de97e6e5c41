"""Tries a micro-batch in a process of its own on every rank; the ranks agree on how the processes ended.

A rank that runs out of memory leaves the others in a collective that may never end (NCCL), or is killed by the kernel.
A process that tries can be ended from outside then, and gives back all memory that it took.
"""

import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from ds_finetune.data.answer_batches import ScoredAnswer, answer_batch
from ds_finetune.data.batches import Batch, BatchPlan
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.stream import START, StreamedRows, streaming_batches
from ds_finetune.engine.devices import exchange
from ds_finetune.system.processes import python_module, with_package
from ds_finetune.system.world import World
from ds_finetune.trainer.batches import batch_plan, prepared_batches
from ds_finetune.trainer.prepare import PreparedRun

DONE, OUT_OF_MEMORY, FAILED, ENDED = "done", "out_of_memory", "failed", "ended"
REQUEST, END = "request.json", "end.json"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 15.0
"""How long a rank's process may still report its own end once another rank's has failed."""
_AGREEMENT = timedelta(minutes=30)
_SHOWN_LINES = 20
STREAM_BATCHES = 32
"""Batches of a stream, whose rows are not known before they are read, among which the longest is looked for."""
_COMPARED = 4096
"""Longest rows whose supervised tokens are counted."""


@dataclass(frozen=True)
class TrialEnd:
    """How the trial of a rank, or of all ranks, ended."""

    outcome: str
    """DONE; OUT_OF_MEMORY; FAILED for another reason; or ENDED, because the trial of another rank had failed."""
    peak_bytes: int = 0
    """The most that the rank, or the fullest one, took of its device; see `PeakMemory.num_bytes`."""
    error: str = ""
    is_secondary: bool = False
    """Whether the error may only be a consequence of the end of another rank."""


def try_steps(tree: Mapping[str, Any], world: World, store: dist.Store, *, topic: str) -> TrialEnd:
    """Try a few steps of the run file `tree` in fresh processes, one on each rank; collective, before there is a
    process group.

    `topic` names this trial in `store`.
    """
    # The processes meet at the ranks' own store, below a name that no other trial has.
    prefix = exchange(store, world, f"{topic} name", secrets.token_hex(8), timeout=_AGREEMENT)[0]
    request = {"config": tree, "world": asdict(world), "prefix": prefix}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, REQUEST).write_text(json.dumps(request), encoding="utf-8")
        end = _run_process(Path(folder), store, f"{topic} failed")
    ends = exchange(store, world, f"{topic} ends", json.dumps(asdict(end)), timeout=_AGREEMENT)
    return judge([TrialEnd(**json.loads(text)) for text in ends])


def judge(ends: Sequence[TrialEnd]) -> TrialEnd:
    """The trial of the ranks that ended so, by rank.

    Memory that ran out on one rank explains what other ranks report; else the first error that is no consequence does.
    """
    peak, order = max(end.peak_bytes for end in ends), [OUT_OF_MEMORY, FAILED, ENDED, DONE]
    rank, worst = min(enumerate(ends), key=lambda each: (order.index(each[1].outcome), each[1].is_secondary))
    return TrialEnd(worst.outcome, peak, "" if worst.outcome == DONE else f"rank {rank}: {worst.error}")


def _run_process(folder: Path, store: dist.Store, failed: str) -> TrialEnd:
    """How this rank's process ended; it is killed where another rank's has `failed` and it does not end by itself."""
    command = python_module("ds_finetune.trainer.trial_process", str(os.getpid()), str(folder))
    with (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(
            command, env=with_package(os.environ), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
    until = float("inf")
    try:
        while process.poll() is None:
            if until == float("inf") and store.check([failed]):
                until = time.monotonic() + _GRACE_SECONDS
            if time.monotonic() > until:
                return TrialEnd(ENDED, error="ended, because the trial of another rank had failed")
            time.sleep(_POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
    end = _end_of(folder, process.returncode)
    if end.outcome != DONE:
        store.set(failed, "")
    return end


def _end_of(folder: Path, code: int) -> TrialEnd:
    if (folder / END).exists():
        return TrialEnd(**json.loads((folder / END).read_text(encoding="utf-8")))
    if code == -signal.SIGKILL:
        return TrialEnd(OUT_OF_MEMORY, error="killed by SIGKILL, as the kernel does where the host has no memory")
    lines = (folder / "errors").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_SHOWN_LINES:]
    return TrialEnd(FAILED, error="\n".join([f"exit code {code}", *lines]))


def longest_rows(rows: PreparedRows, number: int) -> NDArray[np.int64]:
    """The rows with the most tokens, int64 [number] or fewer where there are no more, longest first; of rows of the
    same length those with the most supervised tokens.
    """
    size = max(rows.kind.documents_per_unit, 1)
    units = np.diff(rows.documents.offsets).reshape(-1, size).sum(axis=1)
    ends = np.concatenate([[0], np.cumsum(units[rows.order])])
    tokens = ends[rows.offsets[1:]] - ends[rows.offsets[:-1]]
    most = np.argsort(-tokens, kind="stable")[: max(number, _COMPARED)]
    supervised = np.array([rows.sizes(int(row))[1] for row in most])
    chosen: NDArray[np.int64] = most[np.lexsort((most, -supervised, -tokens[most]))][:number]
    return chosen


def rows_again(rows: PreparedRows, numbers: NDArray[np.int64]) -> PreparedRows:
    """A collection of the rows `numbers`, each as often as it is named."""
    units = [rows.order[rows.offsets[number] : rows.offsets[number + 1]] for number in numbers]
    offsets = np.cumsum([0, *map(len, units)])
    return replace(rows, order=np.concatenate(units), offsets=offsets, mixture=None)


def trial_batches(run: PreparedRun, *, steps: int) -> Iterator[Batch]:
    """Batches of `steps` steps for this rank; every forward has the longest rows of all data."""
    rows, plan = run.inputs.train, replace(batch_plan(run), shuffle=False, row_cost=None, mixture=None)
    if run.model.objective.head == "answers":
        yield from [_full_answers(run, plan)] * steps
        return
    if isinstance(rows, StreamedRows):
        read = streaming_batches(rows, plan, steps=STREAM_BATCHES, start_step=0, start=START)
        longest = max(islice(read, STREAM_BATCHES), key=lambda batch: max(m.input_ids.numel() for m in batch.micro))
        yield from [longest] * steps
        return
    chosen = longest_rows(rows, plan.micro_batch_size)
    view = rows_again(rows, np.resize(chosen, plan.global_batch_size))
    yield from prepared_batches(run, view, plan, start_step=0, total_rows=steps * plan.global_batch_size)


def _full_answers(run: PreparedRun, plan: BatchPlan) -> Batch:
    """A step on rows that an answer fills, since the answers of a run are not known before it."""
    ids, zeros = [0] * run.plan.batch.max_seq_len, np.zeros(run.plan.batch.max_seq_len - 1, dtype=np.float32)
    known: dict[str, Any] = {"sampled": zeros, "old": zeros, "reference": zeros}
    answers = [ScoredAnswer(ids[:1], ids[1:], 1.0, number, **known) for number in range(plan.global_batch_size)]
    return answer_batch(answers, plan)

"""What a run records for its report, and the report at its end: each start, the training data, verified exports."""

import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ds_finetune.checkpoint.run_state import versions
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.console.phase_line import Say
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.export.verify.verify import VerificationResult
from ds_finetune.observers.record import StepRecord
from ds_finetune.runs.report.write import try_run_report
from ds_finetune.trainer.batches import mixture_lines
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.preview import count_lines, document_title, marked_spans
from ds_finetune.trainer.run_dir import prepare_run_folder
from ds_finetune.trainer.run_status import StatusKeeper

_SAMPLES = 4
"""Documents, pairs or examples of each source of the training data that are recorded."""
_MOST_SOURCES = 8
_LONGEST = 4000
"""Characters of a recorded document at most."""
Spans = list[tuple[str, bool]]
"""Texts, with whether their tokens are supervised."""


def begin_run_folder(
    run: PreparedRun, progress: RankProgress, status: StatusKeeper, *, after_step: int, last: StepRecord | None
) -> None:
    """Prepare the run folder (`prepare_run_folder`), record this start, and keep the run's status from now on.

    Rank zero does it.
    """
    prepare_run_folder(run.config, run.plan, after_step=after_step, last=last)
    if not run.plan.world.rank:
        _record_start(run, after_step=after_step)
        status.begin(progress, steps=run.schedule.steps, ranks=run.plan.world.world_size)


def _record_start(run: PreparedRun, *, after_step: int) -> None:
    """Append this start to `starts.jsonl` and write `data.json`.

    A new run begins a new list of starts.
    """
    starts = run.output_dir / "starts.jsonl"
    with starts.open("a" if after_step else "w", encoding="utf-8") as file:
        file.write(json.dumps(_start(run, after_step)) + "\n")
    _write_json(run.output_dir / "data.json", _data_summary(run))


@contextmanager
def report_failure(run_folder: Path, say: Say) -> Iterator[None]:
    """Write the report of a run that this process has started where it fails; the error goes on."""
    try:
        yield
    except Exception:
        if _has_started(run_folder):
            try_run_report(run_folder, say, state="failed")
        raise


def record_end(
    run_folder: Path, results: Sequence[VerificationResult], say: Say, *, is_interrupted: bool
) -> Path | None:
    """Write the results of verifying exports to `exports.json` where there are any, and the report of the run.

    Returns the page; None where it could not be written, which `say` tells.
    """
    if results:
        _record_exports(run_folder, results)
    return try_run_report(run_folder, say, state="stopped" if is_interrupted else "finished")


def _record_exports(run_folder: Path, results: Iterable[VerificationResult]) -> None:
    found = [
        {
            "folder": result.folder.name,
            "is_verified": result.is_verified,
            "problems": result.problems,
            "lines": result.lines,
            "skipped": result.skipped,
        }
        for result in results
    ]
    _write_json(run_folder / "exports.json", {"exports": found})


def _has_started(run_folder: Path) -> bool:
    """Whether the last start in the folder is that of this process: another run's report must stay as it is."""
    try:
        start = json.loads((run_folder / "starts.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return False
    return (start.get("host"), start.get("pid")) == (socket.gethostname(), os.getpid())


def _start(run: PreparedRun, after_step: int) -> dict[str, Any]:
    """How and where this start runs. `time` is in seconds since 1970."""
    world = run.plan.world
    is_on_gpu = run.plan.device == "cuda"
    return {
        "time": time.time(),
        "after_step": after_step,
        "steps": run.schedule.steps,
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "launcher": world.launcher,
        "ranks": world.world_size,
        "ranks_per_host": world.local_world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": torch.cuda.get_device_name() if is_on_gpu else f"CPU ({platform.machine()})",
        "versions": {"python": platform.python_version(), **versions()}
        | ({"cuda": str(torch.version.cuda)} if is_on_gpu else {}),
    }


def _data_summary(run: PreparedRun) -> dict[str, Any]:
    rows = run.inputs.train
    # A stream has no counts, and no documents before it is read.
    prepared = rows if isinstance(rows, PreparedRows) else None
    return {
        "summary": rows.summary(),
        "tokens": None if prepared is None else prepared.num_tokens,
        "counts": [] if prepared is None else count_lines(prepared, run.config),
        "mixture": mixture_lines(run),
        "held_out": {name: held_out.summary() for name, held_out in run.inputs.held_out.items()},
        "notes": [*rows.notes, *run.inputs.data_notes()],
        "samples": [] if prepared is None else list(_samples(run, prepared)),
    }


def _samples(run: PreparedRun, rows: PreparedRows) -> Iterator[dict[str, Any]]:
    """The first documents of each source, with the texts of their spans."""
    size = max(rows.kind.documents_per_unit, 1)
    sources: Mapping[str, range] = rows.units_of_sources()
    for source, units in list(sources.items())[:_MOST_SOURCES]:
        documents = chain.from_iterable(range(unit * size, (unit + 1) * size) for unit in units[:_SAMPLES])
        for document in documents:
            spans = list(marked_spans(*rows.document(document), run.inputs.tokenizer))
            yield {"source": source, "title": document_title(rows, document), "spans": _shortened(spans)}


def _shortened(spans: Spans) -> Spans:
    """The spans up to the limit of characters, the last one cut where they are longer."""
    kept: Spans = []
    left = _LONGEST
    for text, is_supervised in spans:
        if left <= 0:
            break
        kept.append((text if len(text) <= left else f"{text[:left]} …", is_supervised))
        left -= len(text)
    return kept


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")

"""What a run records besides metrics: status, log, starts, training data, verified exports, and the final report."""

import json
import math
import os
import platform
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ds_finetune.checkpoint.run_state import versions
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.console.phase_line import Say
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.export.verify.verify import VerificationResult
from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.writers import LineFile
from ds_finetune.runs.folder import LOG, STARTS, RunFolder
from ds_finetune.runs.report.write import REPORT, try_run_report
from ds_finetune.runs.status import ALIVE_SECONDS, RunStatus, State, mark_ended, write_running
from ds_finetune.system.processes import began_at, own_namespace
from ds_finetune.system.whole_file import replace_file, synchronise
from ds_finetune.trainer.batches import mixture_lines
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.preview import count_lines, document_title, documents_of, marked_spans
from ds_finetune.trainer.run_dir import RECORDS, prepare_run_folder

_SAMPLES = 4
"""Number of documents, pairs or examples that are recorded from each source of the training data."""
_MOST_SOURCES = 8
_LONGEST = 4000
"""Maximum number of characters recorded of a document."""
Spans = list[tuple[str, bool]]
"""Consecutive texts of a document, each with whether its tokens are supervised."""
_MOST_WAITING = 1_000
PAGE = REPORT
"""Name of the file in a run folder with the report of the run."""


@dataclass(frozen=True)
class Report:
    """Result of a run: record of the last step, run folder, exports, and seconds."""

    last: StepRecord | None
    """Record of the last step; None if no step was taken."""
    output_dir: Path
    exports: tuple[Path, ...]
    seconds: float = 0.0
    interrupted: str = ""
    """The signal that ended the run, and where it resumes; empty without a signal."""
    verdicts: tuple[VerificationResult, ...] = ()
    """Results of verifying the exports, on rank zero only."""
    page: Path | None = None
    """Path of the HTML report; None on other ranks than zero, and if it could not be written."""
    was_finished: bool = False
    """Whether an earlier start had finished the run, so that this start did nothing."""


class RunLog:
    """Writes `log.txt`: lines that rank zero prints about a run, with times. They are buffered until `open`."""

    def __init__(self, say: Say) -> None:
        self._print = say
        self._waiting: list[str] = []
        self._file: LineFile | None = None
        self._lock = threading.RLock()
        """The watchdog adds lines from a thread of its own, so writing needs a lock."""

    def say(self, line: str) -> None:
        """Print a line, and add it to the log."""
        self._print(line)
        self.add(line)

    def add(self, text: str) -> None:
        """Add a text of one or more lines to the log, without printing it."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        for line in text.splitlines():
            self._put(f"{now}  {line}")

    def open(self, path: Path) -> None:
        """Append buffered lines, and all later ones, to the file `path`. OSError if that fails."""
        self._file = LineFile(path, self._print, most=_MOST_WAITING)
        waiting, self._waiting = self._waiting, []
        for line in waiting:
            self._put(line)

    def close(self) -> None:
        """Write queued lines, and close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put(self, line: str) -> None:
        with self._lock:
            if self._file is None:
                self._waiting = [*self._waiting[-_MOST_WAITING:], line]
            else:
                self._file.put(f"{line}\n")


class StatusKeeper:
    """Writes the status of a run every few seconds, between `begin` and `end`. It has a thread of its own, so that a
    file system that hangs blocks neither the training nor the watchdog.
    """

    def __init__(self, folder: Path, log: RunLog) -> None:
        self._folder, self._log = folder, log
        self._started_at = time.time()
        self._closed = threading.Event()
        self._progress: RankProgress | None = None
        self._thread: threading.Thread | None = None

    def begin(self, progress: RankProgress, *, steps: int, ranks: int) -> None:
        """Start writing the status of a run whose folder exists. `steps` is the number of steps of the whole run."""
        self._log.open(self._folder / LOG)
        first = RunStatus(
            "running",
            steps=steps,
            ranks=ranks,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_namespace=own_namespace("pid"),
            began=began_at(os.getpid()),
            started_at=self._started_at,
        )
        write_running(self._folder, _now(first, progress))
        self._progress = progress
        self._thread = threading.Thread(target=self._keep, args=(first, progress), name="run-status", daemon=True)
        self._thread.start()

    def end(self, state: State, reason: str = "") -> None:
        """Write the final status, unless the watchdog has written it, and end the thread that writes the status, unless
        its file system hangs. Does nothing before `begin` and after the first call.
        """
        if self._progress is None or self._thread is None or self._closed.is_set():
            return
        self._closed.set()
        mark_ended(self._folder, state, reason, step=self._progress.step)
        self._log.add(f"{state}: {reason}" if reason else state)
        self._log.close()
        self._thread.join(ALIVE_SECONDS)

    def end_without_error(self, interrupted: str, stop: str, verdicts: Iterable[VerificationResult]) -> None:
        """Write the final status of a run that ended without an error. `interrupted` is the signal that ended it,
        `stop` the reason of an early stop, and `verdicts` are the results of verifying exports; each may be empty.
        """
        different = [str(verdict.folder) for verdict in verdicts if verdict.problems]
        if interrupted:
            self.end("stopped", interrupted)
        elif different:
            self.end("failed", f"exports that differ from the trained model: {', '.join(different)}")
        else:
            self.end("finished", stop)

    def _keep(self, first: RunStatus, progress: RankProgress) -> None:
        while not self._closed.wait(ALIVE_SECONDS) and write_running(self._folder, _now(first, progress)):
            pass


def _now(first: RunStatus, progress: RankProgress) -> RunStatus:
    try:
        limit = progress.limit_seconds()
    except RuntimeError:
        # The training thread appended a step's time while the median step time was computed.
        limit = math.inf
    return replace(
        first,
        phase=progress.phase,
        step=progress.step,
        updated_at=time.time(),
        idle_seconds=time.monotonic() - progress.last_progress_at(),
        limit_seconds=None if math.isinf(limit) else limit,
    )


@contextmanager
def keep_status(folder: Path, log: RunLog) -> Iterator[StatusKeeper]:
    """Context that keeps the status of the run in `folder`. An error marks the run as failed."""
    keeper = StatusKeeper(folder, log)
    try:
        yield keeper
    except BaseException as error:
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        keeper.end("failed", f"{type(error).__name__}: {text}" if text else type(error).__name__)
        raise


def begin_run_folder(
    run: PreparedRun, progress: RankProgress, status: StatusKeeper, *, after_step: int, last: StepRecord | None
) -> str:
    """On rank zero, prepare the run folder, append this start to `starts.jsonl`, write `data.json`, and start the
    status. Returns a line that names steps without a record, if any.
    """
    if run.plan.world.rank:
        return ""
    lacks = prepare_run_folder(run, after_step=after_step, last=last)
    # The list of starts in a run folder begins anew with a new run.
    with (run.output_dir / STARTS).open("a" if after_step else "w", encoding="utf-8") as file:
        file.write(json.dumps(_start(run, after_step)) + "\n")
    _write_json(run.output_dir / "data.json", _data_summary(run))
    synchronise_records(run.output_dir)
    status.begin(progress, steps=run.schedule.steps, ranks=run.plan.world.world_size)
    return lacks


def synchronise_records(folder: Path) -> None:
    """Flush the records of a run to the disk, so that a power failure does not lose them. They are flushed before a
    checkpoint and at the end of a run. If that fails, the run continues: only a crash could lose records.
    """
    for name in (*RECORDS, STARTS, LOG, PAGE):
        with suppress(OSError):
            synchronise(folder / name)
    with suppress(OSError):
        synchronise(folder)


@contextmanager
def report_failure(run_folder: Path, say: Say) -> Iterator[None]:
    """Context that writes the report of a run that this process has started, if an error ends it."""
    try:
        yield
    except Exception:
        # If another process made the last start of the run, the report in the folder must stay.
        start = RunFolder(run_folder).last_start
        if (start.get("host"), start.get("pid")) == (socket.gethostname(), os.getpid()):
            try_run_report(run_folder, say, state="failed")
            synchronise_records(run_folder)
        raise


def record_end(
    run_folder: Path, results: Sequence[VerificationResult], say: Say, *, is_interrupted: bool
) -> Path | None:
    """Write verification results, if there are any, to `exports.json`, and write the report of the run. Returns the
    path of the report; None if it could not be written, and `say` then prints the reason.
    """
    if results:
        keys = ("is_verified", "problems", "lines", "skipped")
        exports = [{"folder": result.folder.name} | {key: getattr(result, key) for key in keys} for result in results]
        _write_json(run_folder / "exports.json", {"exports": exports})
    page = try_run_report(run_folder, say, state="stopped" if is_interrupted else "finished")
    synchronise_records(run_folder)
    return page


def _start(run: PreparedRun, after_step: int) -> dict[str, Any]:
    """The record of this start: how and where the run starts. `time` is in seconds since 1970."""
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
    rows, plan = run.inputs.train, run.plan
    # Streamed rows have no counts and no documents before training.
    prepared = rows if isinstance(rows, PreparedRows) else None
    return {
        "summary": rows.summary(),
        "tokens": None if prepared is None else prepared.num_tokens,
        "counts": []
        if prepared is None
        else count_lines(prepared, plan.train.max_seq_len, is_packed=plan.data.packing),
        "mixture": mixture_lines(run),
        "held_out": {name: held_out.summary() for name, held_out in run.inputs.held_out.items()},
        "notes": [*rows.notes, *run.inputs.data_notes()],
        "samples": [] if prepared is None else list(_samples(run, prepared)),
    }


def _samples(run: PreparedRun, rows: PreparedRows) -> Iterator[dict[str, Any]]:
    for source, units in islice(rows.units_of_sources().items(), _MOST_SOURCES):
        for document in documents_of(rows, units[:_SAMPLES]):
            spans = _shortened(marked_spans(*rows.document(document), run.inputs.tokenizer))
            yield {"source": source, "title": document_title(rows, document), "spans": spans}


def _shortened(spans: Iterable[tuple[str, bool]]) -> Spans:
    shown, remaining = Spans(), _LONGEST
    for text, is_supervised in spans:
        if remaining <= 0:
            break
        shown.append((text if len(text) <= remaining else f"{text[:remaining]} …", is_supervised))
        remaining -= len(text)
    return shown


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(tree, indent=1) + "\n", is_synced=True)

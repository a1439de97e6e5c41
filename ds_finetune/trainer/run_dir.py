"""Checks the run folder before anything is loaded, then writes the resolved configuration and the plan to it.

Rows that a program passes to `train` are written there too.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ds_finetune.checkpoint.commit import complete_steps
from ds_finetune.checkpoint.locking import LOCK, remove_own_lock
from ds_finetune.checkpoint.tools import CHECKPOINTS
from ds_finetune.config.sections import CheckpointConfig
from ds_finetune.config.units import bytes_text, spans_text
from ds_finetune.errors import DataError, FinetuneError, OutputError
from ds_finetune.export.output_folder import as_output_errors, check_out_empty
from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.writers import line_of
from ds_finetune.plan.estimate.memory import DiskNeed
from ds_finetune.runs.folder import EXPERTS, PLAN, RANK_TIMES, REPORT, STARTS
from ds_finetune.runs.metrics import METRICS, ROLLOUTS, SAMPLES, record_of
from ds_finetune.runs.status import parse_object, read_object
from ds_finetune.system.disk import bytes_below, nearest_existing
from ds_finetune.system.whole_file import replace_file
from ds_finetune.trainer.resolve import ResolvedRun

_LOGS = (".log", ".out", ".err")
"""Suffixes of files to which a shell or scheduler redirects output. No run writes such a file itself."""
Rows = Iterable[Mapping[str, object]]
"""Rows of data: a list of dictionaries, a `datasets.Dataset`, or any other iterable of dictionaries."""
RECORDS = (METRICS, RANK_TIMES, SAMPLES, ROLLOUTS, EXPERTS)
"""Names of the files in a run folder that have one line per step or answer."""
ROWS = "rows"
"""Name of the folder, in the run folder, with rows that a program has passed."""


def check_only_own_files(folder: Path, inputs: Iterable[tuple[str, Path]], *, cache_dir: str) -> None:
    """Raise OutputError if `output_dir` contains an input of the run, or files that are not a run's. Called before a
    run writes. `inputs` are keys of the run file with the files or folders that they name.
    """
    for key, path in inputs:
        is_written_here = path.resolve().parent == (folder / ROWS).resolve()
        if not is_written_here and path.exists() and path.resolve().is_relative_to(folder.resolve()):
            raise OutputError(
                f"{key} `{path}` is in output_dir `{folder}`, where a run replaces files",
                hint="name another output_dir, or move this input file to another folder",
            )
    if folder.is_dir() and not _is_run(folder):
        cache = Path(cache_dir).resolve()
        problem = f"output_dir `{folder}` is not empty and holds no run"
        with as_output_errors(folder):
            check_out_empty(folder, problem, may_hold=lambda entry: _belongs_to_run(entry, cache))


def _is_run(folder: Path) -> bool:
    """Whether a run has begun in `folder`: its plan, or the lock of its checkpoints, exists. config.yaml does not
    count, since users give that name to files of their own.
    """
    return read_object(folder / PLAN).keys() >= {"layout", "notes"} or (folder / CHECKPOINTS / LOCK).is_file()


def _belongs_to_run(entry: Path, cache: Path) -> bool:
    """Whether the folder of a new run may already contain `entry`, because a run would keep or extend it. This includes
    files that launcher and watchdog write before the run.
    """
    if entry.name in ("logs", Path(REPORT).parent.name, ROWS) or entry.name.startswith(".") or entry.suffix in _LOGS:
        return True
    if entry.name == CHECKPOINTS and not complete_steps(entry):
        # If the checkpoints' folder is a link to another disk, it may hold files of others.
        return True
    return cache.is_relative_to(entry.resolve()) or (entry.is_dir() and not any(entry.iterdir()))


def check_run_folder(folder: Path, policy: CheckpointConfig) -> None:
    """Raise OutputError if `output_dir` cannot be written, is a file or a broken link, or has a run that cannot be
    resumed. Leaves no file or folder behind.
    """
    existing = nearest_existing(folder)
    checkpoints, may_resume = folder / CHECKPOINTS, policy.saves and policy.resume != "never"
    has_checkpoints = any(checkpoints.glob("step-*")) or (checkpoints.is_dir() and not (folder / "export").exists())
    if (folder / METRICS).exists() and not (may_resume and has_checkpoints):
        raise OutputError(
            f"output_dir `{folder}` already holds a run (metrics.jsonl)",
            hint="name another output_dir, or move the existing run away",
        )
    dangling = next((path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()), None)
    if dangling is not None:
        raise OutputError(
            f"output_dir `{folder}`: `{dangling}` is a link to `{dangling.readlink()}`, which does not exist",
            hint="create the folder that the link names, or set another output_dir",
        )
    try:
        Path(tempfile.mkdtemp(prefix=".trial-", dir=existing)).rmdir()
    except OSError as refused:
        raise OutputError(
            f"output_dir `{folder}`: no folder can be made in `{existing}`: {refused.strerror}",
            hint="change the folder's permissions, free some space, or name another output_dir",
        ) from refused


def check_run_disk(output_dir: Path, need: DiskNeed) -> None:
    """Raise OutputError if the disk of `output_dir` is too small for the files that this host will write."""
    free = shutil.disk_usage(nearest_existing(output_dir)).free + bytes_below(output_dir)
    if need.num_bytes > free:
        raise OutputError(
            f"output_dir `{output_dir}`: {need.exports} export(s) and {need.checkpoints} checkpoints need "
            f"{bytes_text(need.num_bytes)} and the disk has {bytes_text(free)} for them",
            hint="free some space, name another output_dir, lower checkpoint.keep, or set eval.keep_best: false",
        )


@contextmanager
def remove_empty_on_failure(folder: Path) -> Iterator[None]:
    """If an error ends this context before the first step, remove the empty folders that the trial of saving made."""
    try:
        yield
    except BaseException:
        if not (folder / METRICS).exists():
            remove_own_lock(folder / CHECKPOINTS)
            _remove_empty(folder / CHECKPOINTS)
            _remove_empty(folder)
        raise


def prepare_run_folder(run: ResolvedRun, *, after_step: int = 0, last: StepRecord | None = None) -> str:
    """Create the run folder with `config.yaml` (enough to run again), `plan.json` and `deepspeed.json`. Records of
    steps after `after_step` are removed, because these steps are taken again. `last` is the record of step
    `after_step`, which is added to the records if it is missing because the run was killed just after its checkpoint.
    Returns a message that names the steps without a record, or an empty text.
    """
    folder, plan = run.output_dir, run.plan
    plan_text = json.dumps({**dict(plan.decisions), "notes": plan.notes}, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The plan is written first, since `_is_run` tests for it. A config.yaml without a plan is a user's file.
        replace_file(folder / PLAN, plan_text, is_synced=True)
        replace_file(folder / "config.yaml", run.text, is_synced=True)
        replace_file(folder / "deepspeed.json", json.dumps(plan.deepspeed_config, indent=2) + "\n", is_synced=True)
        for name in RECORDS:
            _remove_records(folder / name, after_step, last if name == METRICS else None)
        return _missing_steps(folder, after_step)
    except OSError as full:
        reason = full.strerror or full
        raise OutputError(
            f"output_dir `{folder}` cannot be written: {reason}", hint="free some space, or name another output_dir"
        ) from full


def _remove_records(file: Path, after_step: int, last: StepRecord | None) -> None:
    """Remove records after step `after_step`, and add `last` if it is missing. Lines are split at newline bytes only,
    because texts may contain the line separator U+2028.
    """
    if not file.exists():
        return
    steps = [(line, step) for line in file.read_bytes().split(b"\n") if (step := _step_of(line)) is not None]
    lines = [line + b"\n" for line, step in steps if step <= after_step]
    if last is not None and all(step != last.step for _, step in steps):
        lines.append(line_of(last).encode())
    replace_file(file, b"".join(lines), is_synced=True)


def _missing_steps(folder: Path, after_step: int) -> str:
    """A line that names the steps up to `after_step` that metrics.jsonl lacks; empty if it lacks none."""
    starts, metrics = folder / STARTS, folder / METRICS
    if not after_step or not (starts.exists() or metrics.exists()):
        # The checkpoint is from another folder, so this folder may lack records of earlier steps.
        return ""
    start = parse_object(starts.read_bytes().partition(b"\n")[0] if starts.exists() else b"").get("after_step")
    recorded = set(map(_step_of, metrics.read_bytes().split(b"\n") if metrics.exists() else ()))
    missing = sorted(set(range((start if isinstance(start, int) else 0) + 1, after_step + 1)) - recorded)
    if not missing:
        return ""
    return f"{metrics} LACKS THE RECORDS OF STEPS {spans_text(missing, ', ')}: trained, but lost with a machine or disk"


def _step_of(line: bytes) -> int | None:
    record = record_of(line)
    return None if record is None else record["step"]


def write_rows(output_dir: Path, rows: Mapping[str, Rows]) -> dict[str, tuple[str]]:
    """Write rows that a program passes as `train` and `eval` to files in `output_dir`, and return the paths. Called on
    every rank. DataError if rows cannot be written as JSON; OutputError if the folder cannot be written.
    """
    return {name: (_write(rows_of_set, name, output_dir / ROWS),) for name, rows_of_set in rows.items()}


@contextmanager
def begun_with_rows(folder: Path, rows: Mapping[str, Rows], *, is_first: bool) -> Iterator[dict[str, tuple[str]]]:
    """Context with the paths of `write_rows`. If the run is refused before it begins, rank zero removes the files."""
    was_there = folder.exists()
    try:
        yield write_rows(folder, rows)
    except FinetuneError:
        if is_first and not _is_run(folder):
            for path in (path for name in rows for path in (folder / ROWS).glob(f"{name}-*.jsonl")):
                path.unlink(missing_ok=True)
            for created in (folder / ROWS,) if was_there else (folder / ROWS, folder):
                _remove_empty(created)
        raise


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _write(rows: Rows, name: str, folder: Path) -> str:
    """Write rows to a file named by a hash of its content, unless it exists. The file's modification time is constant.
    Path, size and modification time are the cache key of prepared rows, and must be equal for ranks that write the
    file concurrently.
    """
    accepted = "a list of dictionaries or a datasets.Dataset, such as dataset['train']"
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise DataError(f"the rows of data.{name} are a `{type(rows).__name__}`", hint=f"give {accepted}")
    content, ending = _with_classes(rows), "parquet"
    if not content:
        lines = [_line(row, f"row {number} of data.{name}", accepted) for number, row in enumerate(rows, start=1)]
        content, ending = "".join(lines).encode(), "jsonl"
    if not content:
        raise DataError(f"data.{name} has 0 rows", hint=f"give {accepted}")
    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.{ending}"
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            partial.write_bytes(content)
            os.utime(partial, (0, 0))
            partial.replace(path)
    except OSError as refused:
        raise OutputError(f"`{path}` cannot be written: {refused.strerror}", hint="name another output_dir") from None
    return str(path)


def _with_classes(rows: Rows) -> bytes:
    """Bytes of a Parquet file if `rows` are a `datasets.Dataset` with class names (JSON has none); else empty."""
    features: Any = getattr(rows, "features", None) or {}
    table: Any = rows
    if not any(type(kind).__name__ == "ClassLabel" for kind in features.values()) or not isinstance(rows, Sized):
        return b""
    from pyarrow import BufferOutputStream, parquet

    sink = BufferOutputStream()
    metadata = features.arrow_schema.metadata
    parquet.write_table(table.with_format("arrow")[:].replace_schema_metadata(metadata), sink)
    return bytes(sink.getvalue()) if len(rows) else b""


def _line(row: object, where: str, accepted: str) -> str:
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is a `{type(row).__name__}`, not a dictionary", hint=f"give {accepted}")
    try:
        return json.dumps(dict(row), allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as other:
        raise DataError(f"{where} is not JSON: {other}", hint="give texts, numbers, lists and dictionaries") from None

"""Runs the parts of a slice, each in a process of its own, so that none can stop the others."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from bench.gpu.results import Recorder, ResultFile
from bench.gpu.slices import SLICES, Part

_LINES_OF_LOG = 15


def run_slice(name: str, out: Path, *, size: str) -> bool:
    """Run the parts of slice `name`, whose results are `out/NAME.json`; whether none has failed or, where `size`
    is full, was skipped. A rehearsal may skip what its machine cannot do.
    """
    file = ResultFile(out / f"{name}.json")
    for each in (file.path, _log(file)):
        each.unlink(missing_ok=True)
    for part in SLICES[name]:
        began = time.monotonic()
        arguments = [name, "--part", part.name, "--out", str(out), "--size", size]
        # A CPU is slow, and may be shared.
        ended = _run_process(arguments, seconds=part.seconds * (10 if size == "tiny" else 1))
        note_end(file, part.name, ended, seconds=time.monotonic() - began)
    found = {record["result"] for record in file.read()["records"]}
    return not found & ({"failed"} if size == "tiny" else {"failed", "skipped"})


def note_end(file: ResultFile, part: str, ended: str, *, seconds: float) -> None:
    """Write down that a part did not end well, with what it was doing; `ended` is empty where it did."""
    found = file.read()
    if not ended:
        if not any(record["part"] == part for record in found["records"]):
            Recorder(file, part).add(part, "failed", seconds=seconds, values={}, error="it measured nothing")
        return
    running = found["running"] or {}
    name = running["name"] if running.get("part") == part else part
    Recorder(file, part).add(name, "failed", seconds=seconds, values={}, error=ended)
    with contextlib.suppress(FileNotFoundError):
        lines = _log(file).read_text(errors="replace").splitlines()[-_LINES_OF_LOG:]
        sys.stdout.write("".join(f"    {line}\n" for line in lines))


def _log(file: ResultFile) -> Path:
    """What the parts of a slice write beside their records."""
    return file.path.with_suffix(".log")


def _run_process(arguments: list[str], *, seconds: float) -> str:
    """Run `python -m bench.gpu` with `arguments`; how it ended, empty where it succeeded."""
    process = subprocess.Popen([sys.executable, "-m", "bench.gpu", *arguments], start_new_session=True)
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"ended after its {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with code {code}" if code else ""


def run_part(slice_name: str, part: Part, out: Path, *, size: str, lines: TextIO = sys.stdout) -> None:
    """Measure one part in this process; the lines of its records go to `lines`."""
    from bench.gpu.machine import describe

    file = ResultFile(out / f"{slice_name}.json")
    before = [record for record in file.read()["records"] if record["part"] != part.name]
    file.update(machine=describe(), records=before)
    work = part.function()
    # What is imported is not looked through after each record.
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        work(Recorder(file, part.name, lines), Path(folder), is_tiny=size == "tiny")


@contextlib.contextmanager
def quiet(slice_name: str, out: Path) -> Iterator[TextIO]:
    """What this process and its children write goes to the slice's log, but for what is written to the result."""
    out.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as lines, _log(ResultFile(out / f"{slice_name}.json")).open("a") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        yield lines

"""Runs the parts of a slice, each in a process of its own, so that none can stop the others."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.gpu.results import Recorder, ResultFile
from bench.gpu.slices import SLICES, Part

_LEAST_SECONDS = 20
"""A part is not started where less is left of the slice."""


def run_slice(name: str, out: Path, *, size: str) -> bool:
    """Run the parts of slice `name`, whose results are `out/NAME.json`; whether none has failed or, where `size`
    is full, was skipped. A rehearsal may skip what its machine cannot do, but no part for want of time.
    """
    file, until = ResultFile(out / f"{name}.json"), time.monotonic() + SLICES[name].seconds
    file.path.unlink(missing_ok=True)
    is_complete = True
    for part in SLICES[name].parts:
        left = until - time.monotonic()
        if left < _LEAST_SECONDS:
            reason = f"the {SLICES[name].seconds} s of the slice were used up"
            file.add({"part": part.name, "name": part.name, "result": "skipped", "reason": reason, "values": {}})
            is_complete = False
            continue
        arguments = [name, "--part", part.name, "--out", str(out), "--size", size]
        ended = _run_process(arguments, seconds=min(part.seconds, left))
        note_end(file, part.name, ended)
    found = {record["result"] for record in file.read()["records"]}
    return is_complete and not found & ({"failed"} if size == "tiny" else {"failed", "skipped"})


def note_end(file: ResultFile, part: str, ended: str) -> None:
    """Write down that a part did not end well, with what it was doing; `ended` is empty where it did."""
    found = file.read()
    if not ended:
        return
    running = found["running"] or {}
    name = running.get("name", part) if running.get("part", part) == part else part
    file.add({"part": part, "name": name, "result": "failed", "error": ended, "values": {}})


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


def run_part(slice_name: str, part: Part, out: Path, *, size: str) -> None:
    """Measure one part in this process."""
    from bench.gpu.machine import describe

    file = ResultFile(out / f"{slice_name}.json")
    before = [record for record in file.read()["records"] if record["part"] != part.name]
    file.update(machine=describe(), records=before)
    recorder = Recorder(file, part.name)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        part.work(recorder, Path(folder), is_tiny=size == "tiny")

"""Functions that `doctor` and `launch` call on each host, where they start this module."""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_finetune.cluster.host_checks import State
from ds_finetune.cluster.host_program import HostProgram, created_paths, facts, kill_children, starting
from ds_finetune.config.units import GIB
from ds_finetune.system.disk import bytes_below, nearest_existing
from ds_finetune.system.free_memory import available_bytes
from ds_finetune.system.info import query_gpus
from ds_finetune.system.processes import python_module, with_package

_TAIL_BYTES = 20_000
_MEMORY_MARGIN = 0.8
Row = tuple[str, State, str, str]
"""The result of one check on this host: the name of the check, its state, what was observed, and a hint."""


def gpus() -> list[Row]:
    """Warn about this host's GPUs if other programs use their memory, if a GPU admits only one process, or if Triton
    lacks a compiler for its kernels.
    """
    listed, rows = query_gpus(), list[Row]()
    if busy := [str(number) for number, gpu in enumerate(listed) if (gpu.used_bytes or 0) > GIB]:
        text = f"GPU {', '.join(busy)} has more than 1 GiB in use"
        rows.append(("gpus", "warn", text, "find the process with nvidia-smi"))
    if exclusive := [str(number) for number, gpu in enumerate(listed) if gpu.compute_mode.startswith("Exclusive")]:
        hint = "train.micro_batch_size auto and export.verify need a second process; allow it with `nvidia-smi -c 0`"
        rows.append(("gpus", "warn", f"GPU {', '.join(exclusive)} admits one process", hint))
    # Imported here, because `launch` waits for hosts, and needs only their facts.
    from ds_finetune.plan.kernels import triton_problem

    problem, hint = triton_problem()
    if problem:
        rows.append(("kernels", "warn", f"Triton cannot compile kernels: {problem}; auto chooses those of torch", hint))
    return rows


def compiler(operators: Sequence[str]) -> list[Row]:
    """Check that there is a C++ compiler, with which torch builds the DeepSpeed `operators` of the run."""
    program, names = shlex.split(os.environ.get("CXX", "c++"))[0], " and ".join(operators)
    if operators and not shutil.which(program):
        text = f"there is no C++ compiler `{program}` to build {names} of DeepSpeed"
        return [("kernels", "fail", text, "install a C++ compiler (Debian: g++), or set CXX to its path")]
    return [("kernels", "ok", f"`{program}` can build {names} of DeepSpeed", "")] if operators else []


def memory(host_bytes: int, gpu_bytes: int) -> list[Row]:
    """Check that the memory of the ranks, without activations, fits into this host's memory and its smallest GPU."""
    totals = [gpu.total_bytes for gpu in query_gpus() if gpu.total_bytes is not None] if gpu_bytes else []
    rows = list[Row]()
    for what, needed, room in (("host", host_bytes, available_bytes()), ("GPU", gpu_bytes, min(totals, default=None))):
        if room is not None:
            state: State = "fail" if needed > room else "warn" if needed > _MEMORY_MARGIN * room else "ok"
            text = f"{what}: the run needs more than {needed / GIB:,.2f} GiB of memory, {room / GIB:,.1f} GiB are there"
            hint = "" if state == "ok" else "use more hosts, a higher ZeRO stage, offload, or a smaller model"
            rows.append(("memory", state, text, hint))
    return rows


def disk(folder: str, num_bytes: int) -> list[Row]:
    """Check that the disk of `folder` (output_dir) has room for the `num_bytes` of a run. Files of an earlier run there
    count as free space, because the new run replaces them.
    """
    existing = nearest_existing(Path(folder))
    held = bytes_below(Path(folder)) if Path(folder, "metrics.jsonl").exists() else 0
    room = shutil.disk_usage(existing).free + held
    text, hint = f"{folder} needs {num_bytes / GIB:,.2f} GiB at most, {room / GIB:,.1f} GiB are free", ""
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        hint = "change the permissions, or name another output_dir"
        text = f"{existing} is not a folder with write permission"
    elif num_bytes > room:
        hint = "free some space, name another output_dir, or lower checkpoint.keep"
    return [("disk", "fail" if hint else "ok", text, hint)]


def digests(paths: Sequence[str]) -> dict[str, str]:
    """Map each path to a digest of the names and sizes of its files; the digest of a missing path is empty."""
    files = {path: sorted(file for file in (Path(path), *Path(path).rglob("*")) if file.is_file()) for path in paths}
    sizes = {path: "\n".join(f"{file} {file.stat().st_size}" for file in below) for path, below in files.items()}
    return {path: hashlib.sha256(text.encode()).hexdigest() if text else "" for path, text in sizes.items()}


def create_marker(folders: Sequence[str], marker: str) -> None:
    """Create the empty file `marker` in each folder, or in the nearest existing parent of a folder that does not exist.
    Folders without write permission are skipped.
    """
    for folder in folders:
        path = nearest_existing(Path(folder)) / marker
        with starting, suppress(OSError):
            path.touch()
            created_paths.append(path)


def find_marker(folders: Sequence[str], marker: str) -> dict[str, tuple[bool, bool]]:
    """Map each folder to two facts: whether this host may write there, and whether it sees the file `marker` there,
    which another host has created.
    """
    existing = {folder: nearest_existing(Path(folder)) for folder in folders}
    return {folder: (os.access(top, os.W_OK | os.X_OK), (top / marker).exists()) for folder, top in existing.items()}


def run(module: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run a Python module for at most `seconds`; returns the exit code (None if killed) and the end of its output."""
    with starting:
        folder = Path(tempfile.mkdtemp(prefix="ds_finetune-doctor-"))
        created_paths.append(folder)
        # torch's elastic agent leaves temporary folders in TMPDIR, so it gets a TMPDIR that is removed afterwards.
        environ, command = {**with_package(os.environ), "TMPDIR": str(folder)}, python_module(*module)
        with (folder / "output").open("wb") as output:
            stdin, stderr = subprocess.DEVNULL, subprocess.STDOUT
            process = subprocess.Popen(command, env=environ, stdin=stdin, stdout=output, stderr=stderr)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    code = process.poll()
    kill_children()
    text = (folder / "output").read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    shutil.rmtree(folder)
    return code, text


def load_agent() -> None:
    """Import torch before the elastic agent of this host starts. The import takes seconds, and the agents of all hosts
    should start together.
    """
    import ds_finetune.cluster.launch.agent  # noqa: F401


def run_ranks(**arguments: Any) -> bool | str:  # noqa: ANN401 - those of the agent's run_ranks
    """Run the ranks of this host under torch's elastic agent."""
    from ds_finetune.cluster.launch import agent

    return agent.run_ranks(connection, **arguments)


if __name__ == "__main__":
    connection = HostProgram()
    functions = (facts, gpus, compiler, memory, disk, digests, create_marker, find_marker, run, load_agent, run_ranks)
    connection.serve({function.__name__: function for function in functions})

"""Runs the ordinary command in processes of its own, several at once on places of their own, for experiments.

A place is what one run has for itself: GPUs of this machine, or slots of a hostfile.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ds_finetune.cluster.launch.attempt import handle_signals
from ds_finetune.cluster.launch.process_tags import die_with_parent
from ds_finetune.config.hostfile import Host, read_hostfile
from ds_finetune.config.run_file import apply_override, read_yaml, set_key
from ds_finetune.config.schema import validate_tree
from ds_finetune.errors import INTERRUPTED_EXIT_CODE, LaunchError
from ds_finetune.runs.metrics import MetricsReader
from ds_finetune.runs.status import read_object
from ds_finetune.system.info import query_gpus
from ds_finetune.system.processes import began_at, has_ended, own_pid_namespace
from ds_finetune.system.whole_file import replace_file

_PROGRAM = (sys.executable, "-u", "-m", "ds_finetune")
_HERE = "localhost"
LOG, RUN_FILE, PROCESS, RUN, CHECKPOINTS = "output.log", "run.yaml", "process.json", "run", "checkpoints"
_LAST_LINES = 3
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Place:
    """What one run has for itself: so many ranks, on devices of this machine or of hosts."""

    ranks: int
    devices: tuple[str, ...] = ()
    """GPUs of this machine as CUDA_VISIBLE_DEVICES names them; empty on CPUs and with a hostfile."""
    hostfile: str = ""
    include: str = ""
    """The slots of `hostfile`, as `ds-finetune launch --include` takes them."""

    def command(self, run_file: Path) -> list[str]:
        """The words that start `run_file` here: `train` for one rank of this machine, `launch` for all else."""
        if self.hostfile:
            return [*_PROGRAM, "launch", str(run_file), "--hostfile", self.hostfile, "--include", self.include]
        if self.ranks == 1:
            return [*_PROGRAM, "train", str(run_file)]
        return [*_PROGRAM, "launch", str(run_file), "--nproc", str(self.ranks)]

    def environment(self) -> dict[str, str]:
        """The environment of that command."""
        if not self.devices:
            return dict(os.environ)
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(self.devices)}


def places(*, ranks: int, parallel: int, hostfile: str | None, folder: Path) -> list[Place]:
    """Places of `ranks` ranks each: `parallel` ones of this machine, or all that the slots of `hostfile` make.

    LaunchError where there are too few GPUs or slots. Where a run needs several GPUs of this machine, a hostfile for
    it is written to `folder`, since `launch` chooses devices only by a hostfile.
    """
    if hostfile is not None:
        return _on_hosts(hostfile, read_hostfile(hostfile), ranks)
    gpus = visible_gpus()
    if not gpus:
        return [Place(ranks)] * parallel
    if parallel * ranks > len(gpus):
        raise LaunchError(
            f"{parallel} runs at once of {ranks} ranks each need {parallel * ranks} GPUs, and {len(gpus)} are visible",
            hint="lower `parallel` or `ranks`, set CUDA_VISIBLE_DEVICES to more GPUs, or give a hostfile",
        )
    groups = [gpus[first : first + ranks] for first in range(0, parallel * ranks, ranks)]
    if ranks == 1:
        return [Place(1, devices=group) for group in groups]
    return _on_this_machine(groups, ranks, folder)


def visible_gpus() -> tuple[str, ...]:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, as it names them; none where runs use the CPU."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return ()
    present = tuple(str(number) for number in range(len(query_gpus())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    named = tuple(word.strip() for word in visible.split(","))
    return () if named in (("",), ("-1",), ("NoDevFiles",)) else named


def _on_this_machine(groups: Sequence[tuple[str, ...]], ranks: int, folder: Path) -> list[Place]:
    """Places of several GPUs each; LaunchError where they are not named by numbers, as `launch` needs them."""
    named = [name for group in groups for name in group]
    if not all(name.isdecimal() for name in named):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES is `{os.environ['CUDA_VISIBLE_DEVICES']}`, and runs of {ranks} ranks need numbers",
            hint="name the GPUs by their numbers",
        )
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / "hosts"
    own.write_text(f"{_HERE} slots={max(map(int, named)) + 1}\n", encoding="utf-8")
    return [Place(ranks, hostfile=str(own), include=f"{_HERE}:{','.join(group)}") for group in groups]


def _on_hosts(hostfile: str, hosts: Sequence[Host], ranks: int) -> list[Place]:
    """The slots of hosts in groups of `ranks`: within one host where it has enough of them, else of whole hosts."""
    most = max(host.slots for host in hosts)
    groups = _within_hosts(hosts, ranks) if ranks <= most else _whole_hosts(hosts, ranks)
    if not groups:
        raise LaunchError(
            f"{hostfile} has {sum(host.slots for host in hosts)} slots on {len(hosts)} hosts, and no group of whole "
            f"hosts has the {ranks} ranks of a run",
            hint="choose `ranks` so that it is at most the slots of a host, or the slots of several whole hosts",
        )
    return [Place(ranks, hostfile=hostfile, include=include) for include in groups]


def _within_hosts(hosts: Sequence[Host], ranks: int) -> list[str]:
    return [
        f"{host.name}:{','.join(map(str, range(first, first + ranks)))}"
        for host in hosts
        for first in range(0, host.slots - ranks + 1, ranks)
    ]


def _whole_hosts(hosts: Sequence[Host], ranks: int) -> list[str]:
    groups: list[str] = []
    names: list[str] = []
    slots = 0
    for host in hosts:
        names, slots = [*names, host.name], slots + host.slots
        if slots > ranks:
            names, slots = [host.name], host.slots
        if slots == ranks:
            groups.append("@".join(names))
            names, slots = [], 0
    return groups


def short_run(run_file: Path, overrides: Sequence[str], *, steps: int, output_dir: Path) -> dict[str, Any]:
    """The run file with `overrides` and so many steps, without evaluation, checkpoints, exports and trackers.

    ConfigError where it is not valid.
    """
    tree, lines = read_yaml(run_file)
    for override in overrides:
        apply_override(tree, lines, override)
    validate_tree(tree, lines, str(run_file))
    tree = {key: value for key, value in tree.items() if key not in ("eval", "launch")}
    tree["data"] = {key: value for key, value in tree["data"].items() if key != "eval"}
    tree["train"] = {key: value for key, value in tree.get("train", {}).items() if key != "duration"}
    set_key(tree, {}, "train.for", f"{steps} steps", source="--steps")
    off = {"checkpoint": {"every": "never"}, "export": {"at_end": False}, "log": {"trackers": []}}
    return {**tree, **off, "output_dir": str(output_dir)}


def yaml_text(tree: dict[str, Any]) -> str:
    """YAML of a run file."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


class ChildRun:
    """A run that was started in `folder`, which gets `run.yaml`, `output.log`, `process.json` and the run folder `run`.

    Where this process ends for any reason, also by kill -9, the kernel sends the run SIGTERM, so that it saves and
    ends. A run in the same folder is resumed where it has checkpoints, and starts anew where it has none.
    """

    def __init__(self, folder: Path, run_file: str, place: Place) -> None:
        self.folder, self.place = folder, place
        self.metrics = MetricsReader(folder / RUN / "metrics.jsonl")
        self.is_stopped = False
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / RUN).exists() and not (folder / RUN / CHECKPOINTS).is_dir():
            # The command would refuse it.
            shutil.rmtree(folder / RUN)
        replace_file(folder / RUN_FILE, run_file)
        self._began = time.monotonic()
        with (folder / LOG).open("ab") as log:
            self.process = subprocess.Popen(
                place.command(folder / RUN_FILE),
                env=place.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        pid = self.process.pid
        tree = {"namespace": own_pid_namespace(), "pid": pid, "began": began_at(pid)}
        replace_file(folder / PROCESS, json.dumps(tree) + "\n")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it is running. Reads what was added to the metrics."""
        code = self.process.poll()
        self.metrics.update_all()
        return code

    def stop(self) -> None:
        """Let the run save and end; a second call has no effect."""
        if not self.is_stopped and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.is_stopped = True

    def kill(self) -> None:
        """End the run and its processes at once; `launch` ends the ranks that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def why_failed(self, code: int) -> str:
        """The exit code in words, with the last lines of the output."""
        if code == INTERRUPTED_EXIT_CODE:
            return "it was ended by a signal"
        lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        text = " / ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}: {text}"


def is_still_running(folder: Path) -> bool:
    """Whether the run that an earlier experiment started in `folder` still runs, for example because it saves.

    Known only for processes of this host and container; elsewhere the lock of the checkpoint folder keeps runs apart.
    """
    earlier = read_object(folder / PROCESS)
    if earlier.get("namespace") != own_pid_namespace() or not isinstance(earlier.get("pid"), int):
        return False
    return not has_ended(earlier["pid"], str(earlier.get("began", "")))


def is_stopped_code(code: int) -> bool:
    """Whether a run that was told to end has ended with `code`: after it had saved, or by the signal itself.

    A run that saves nothing, or has trained its last step, does not handle the signal; `launch` adds 128.
    """
    return code in (INTERRUPTED_EXIT_CODE, -signal.SIGTERM, 128 + signal.SIGTERM)


class ExperimentJob:
    """One run of an experiment: the run file `tree` in `folder`, and what follows from its metrics and its end."""

    def __init__(self, folder: Path, tree: dict[str, Any]) -> None:
        self.folder, self.tree = folder, tree
        self.metrics = MetricsReader(folder / RUN / "metrics.jsonl")
        self.reason, self.code = "", 0
        """Why it has failed, and its exit code."""

    def progressed(self, child: ChildRun) -> None:
        """Do something now and then while it runs."""

    def ended(self, child: ChildRun, code: int) -> None:
        """Keep the metrics, or why the run has failed."""
        self.metrics, self.code = child.metrics, code
        self.reason = child.why_failed(code) if code else ""


_Running = dict[int, tuple[ExperimentJob, ChildRun]]
"""Jobs and their runs by process id."""


class JobsInterruptedError(Exception):
    """A signal came; all runs have saved and ended."""


def run_jobs(jobs: Iterator[ExperimentJob], places: list[Place]) -> None:
    """Run all jobs; the iterator is asked for the next one when a place is free.

    On SIGINT, SIGTERM or SIGHUP the runs save and end, no job is told of its end, and JobsInterruptedError is raised; a
    second signal kills them. Where the iterator or a job raises an error, the runs save and end as well.
    """
    free, running = list(places), _Running()
    received: list[int] = []
    with handle_signals(received.append):
        try:
            while _start_jobs(jobs, free, running, received) or running:
                free += _look_at(running, received)
        finally:
            _stop_all([child for _, child in running.values()], received)


def _start_jobs(jobs: Iterator[ExperimentJob], free: list[Place], running: _Running, received: list[int]) -> bool:
    """Start a job on each free place, which leaves `free`; returns whether the iterator had one for each."""
    while free:
        job = next(jobs, None)
        if job is None:
            return False
        while is_still_running(job.folder):
            _pause(received)
        child = ChildRun(job.folder, yaml_text(job.tree), free.pop())
        running[child.process.pid] = job, child
    return True


def _pause(received: list[int]) -> None:
    """Wait a moment; JobsInterruptedError after a signal."""
    time.sleep(_POLL_SECONDS)
    if received:
        raise JobsInterruptedError


def _look_at(running: _Running, received: list[int]) -> list[Place]:
    """Wait a moment; places of the runs that have ended, which leave `running`."""
    _pause(received)
    left = []
    for pid, (job, child) in list(running.items()):
        code = child.exit_code()
        job.progressed(child)
        if code is not None:
            del running[pid]
            left.append(child.place)
            job.ended(child, code)
    return left


def _stop_all(children: list[ChildRun], received: list[int]) -> None:
    """Let runs save and end; a further signal kills them."""
    known = len(received)
    for child in children:
        child.stop()
    while any(child.process.poll() is None for child in children):
        time.sleep(_POLL_SECONDS)
        if len(received) > known:
            for child in children:
                child.kill()

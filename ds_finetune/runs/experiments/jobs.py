"""Starts the runs of an experiment as processes of `ds-finetune`, several at once on separate GPUs or hosts."""

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from ds_finetune.config.hostfile import Host, read_hostfile
from ds_finetune.config.run_file import apply_override, read_yaml, set_key
from ds_finetune.config.schema import validate_tree
from ds_finetune.console.tables import show_line
from ds_finetune.errors import INTERRUPTED_EXIT_CODE, ConfigError, LaunchError, OutputError
from ds_finetune.runs.metrics import METRICS, MetricsReader
from ds_finetune.system.processes import die_with_parent, handle_signals
from ds_finetune.system.whole_file import replace_file

_PROGRAM = (sys.executable, "-u", "-m", "ds_finetune")
LOG, RUN_FILE, RUN, CHECKPOINTS, REPORT = "output.log", "run.yaml", "run", "checkpoints", "report.html"
_LAST_LINES = 3
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RunSlot:
    """Devices that one run at a time may use. A run starts there with `command` and `options` of `ds-finetune`.

    `gpus` go into CUDA_VISIBLE_DEVICES. They are empty for runs on CPUs and on the hosts of a hostfile.
    """

    command: str = "train"
    options: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()


def run_slots(*, ranks: int, parallel: int, hostfile: str | None) -> list[RunSlot]:
    """Make slots for runs of `ranks` ranks each: `parallel` slots on this machine, or as many as fit on the hosts of
    `hostfile`.

    LaunchError if this machine has too few GPUs, or the hosts have too few slots.
    """
    if hostfile is not None:
        groups = _groups_of_slots(hostfile, read_hostfile(hostfile), ranks)
        return [RunSlot("launch", ("--hostfile", hostfile, "--include", group)) for group in groups]
    command, options = ("launch", ("--nproc", str(ranks))) if ranks > 1 else ("train", ())
    number = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number)))).split(",")[:number]
    if number and parallel * ranks > number:
        raise LaunchError(
            f"{parallel} parallel runs of {ranks} ranks each need {parallel * ranks} GPUs, but {number} are visible",
            hint="lower `parallel` or `ranks`, set CUDA_VISIBLE_DEVICES to more GPUs, or give a hostfile",
        )
    starts = range(0, parallel * ranks, ranks)
    return [RunSlot(command, options, tuple(names[start : start + ranks])) for start in starts]


def _groups_of_slots(hostfile: str, hosts: Sequence[Host], ranks: int) -> list[str]:
    """Divide hosts into groups of `ranks` slots, each written as for `--include`. A group has slots of one host, or all
    slots of several equal hosts.
    """
    most = max(host.slots for host in hosts)
    if ranks <= most:
        return [
            f"{host.name}:{','.join(map(str, range(first, first + ranks)))}"
            for host in hosts
            for first in range(0, host.slots - ranks + 1, ranks)
        ]
    names, number = [host.name for host in hosts if host.slots == most], ranks // most
    if ranks % most or number > len(names):
        raise LaunchError(
            f"{hostfile} has {len(names)} hosts of {most} slots, from which no group of {ranks} ranks can be formed",
            hint=f"set `ranks` to at most {most}, or to a multiple of {most} that the hosts have",
        )
    return ["@".join(names[first : first + number]) for first in range(0, len(names) - number + 1, number)]


@dataclass(frozen=True)
class ShortRuns:
    """Settings of an experiment: the run file with overrides, the steps of each run, and a new folder for results."""

    run_file: Path
    overrides: Sequence[str]
    steps: int
    folder: Path

    def check(self, fewest_steps: int) -> None:
        """Raise ConfigError if runs have fewer than `fewest_steps` steps, or OutputError if `folder` exists."""
        if self.steps < fewest_steps:
            raise ConfigError(f"--steps {self.steps} is too few to measure", hint=f"take {fewest_steps} or more")
        if self.folder.exists():
            raise OutputError(f"the output folder `{self.folder}` exists already", hint="name another folder")

    def run_tree(self, output_dir: Path) -> dict[str, Any]:
        """Make the run file of one run from that of the experiment, without evaluation, checkpoints, exports and
        trackers. ConfigError if the run file of the experiment is invalid.
        """
        tree, lines = read_yaml(self.run_file)
        for override in self.overrides:
            apply_override(tree, lines, override)
        validate_tree(tree, lines, str(self.run_file))
        tree = {key: value for key, value in tree.items() if key not in ("eval", "launch")}
        tree["data"] = {key: value for key, value in tree["data"].items() if key != "eval"}
        tree["train"] = {key: value for key, value in tree.get("train", {}).items() if key != "duration"}
        set_key(tree, {}, "train.for", f"{self.steps} steps", source="--steps")
        off = {"checkpoint": {"every": "never"}, "export": {"at_end": False}, "log": {"trackers": []}}
        return {**tree, **off, "output_dir": str(output_dir)}


def yaml_text(tree: dict[str, Any]) -> str:
    """Format a run file as YAML text."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


class ExperimentRun:
    """A run of an experiment with the run file `tree`. In `folder` it writes the files `run.yaml` and `output.log`,
    and its output directory `run`.

    A run that the folder holds already is resumed from its checkpoints, or started again if it has none. If this
    process ends for any reason, even kill -9, the kernel sends SIGTERM to the run, which then saves and ends.

    After `train`, `seconds` is the duration of the run, `code` its exit code, and `reason` why it failed, if it did.
    """

    def __init__(self, folder: Path, tree: dict[str, Any]) -> None:
        self.folder, self.tree = folder, tree
        self.metrics = MetricsReader(folder / RUN / METRICS)
        self.seconds, self.code, self.reason = 0.0, 0, ""

    async def train(self, slot: RunSlot, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Train the run in `slot` until it ends. `should_stop` is called whenever new metrics have been read; once it
        returns true, the run is asked to save and end.

        If this coroutine is cancelled, it waits until the run has saved and ended. A second cancellation kills the run.
        """
        if (process := self._start(slot)) is None:
            show_line(f"waiting for the end of an earlier run that still writes to {self.folder / RUN}")
        while process is None:
            await asyncio.sleep(_POLL_SECONDS)
            process = self._start(slot)
        began, is_stopped, is_running = time.monotonic(), False, True
        try:
            while is_running:
                is_running = process.poll() is None
                self.metrics.update()
                if should_stop() and not is_stopped:
                    process.terminate()
                    is_stopped = True
                await asyncio.sleep(_POLL_SECONDS * is_running)
        finally:
            if not is_stopped:
                process.terminate()
            try:
                while process.poll() is None:
                    await asyncio.sleep(_POLL_SECONDS)
            except asyncio.CancelledError:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        self.seconds, self.code = time.monotonic() - began, process.returncode
        self.reason = self._why_failed() if self.code else ""

    def _start(self, slot: RunSlot) -> subprocess.Popen[bytes] | None:
        """Start the process of the run. Returns None while a process of an earlier experiment still saves in this
        folder: each process holds a lock on its log file. Without locks in the file system, only the lock of the
        checkpoint folder prevents two runs at once.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOG).open("ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError:
                pass
            if (self.folder / RUN).exists() and not (self.folder / RUN / CHECKPOINTS).is_dir():
                # Training would refuse an existing run folder without checkpoints.
                shutil.rmtree(self.folder / RUN)
            replace_file(self.folder / RUN_FILE, yaml_text(self.tree))
            return subprocess.Popen(
                [*_PROGRAM, slot.command, str(self.folder / RUN_FILE), *slot.options],
                env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)} if slot.gpus else {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )

    @property
    def has_diverged(self) -> bool:
        """Whether the run diverged: it failed, and its last step was skipped because the gradient was not finite.

        A run that skipped its last step and succeeded, as with fp16, has not diverged.
        """
        skipped = self.metrics.curves.get("train/skipped")
        return self.code != 0 and skipped is not None and skipped.last > 0

    def _why_failed(self) -> str:
        if self.code == INTERRUPTED_EXIT_CODE:
            return "it was ended by a signal"
        lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        text = " / ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
        how = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
        return f"{how}: {text}"


Job = Callable[[RunSlot], Awaitable[None]]


class JobsInterruptedError(SystemExit):
    """Raised when a signal has ended an experiment and all its runs have saved. Has an interrupted run's exit code."""


def run_jobs(jobs: Iterator[Job], slots: Sequence[RunSlot]) -> None:
    """Run all jobs, each in the next free slot.

    After SIGINT, SIGTERM or SIGHUP the runs save and end, and JobsInterruptedError is raised; a second signal kills
    them. If the iterator or a job raises an error, the runs also save and end before it is raised.
    """

    async def work(slot: RunSlot) -> None:
        for job in jobs:
            await job(slot)

    async def work_on_all() -> bool:
        tasks = [asyncio.create_task(work(slot)) for slot in slots]

        def cancel(_: int = 0) -> None:
            for task in tasks:
                task.cancel()

        with handle_signals(cancel):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            cancel()
            await asyncio.wait(tasks)
        for error in filter(None, (task.exception() for task in tasks if not task.cancelled())):
            raise error
        return any(task.cancelled() for task in tasks)

    if asyncio.run(work_on_all()):
        raise JobsInterruptedError(INTERRUPTED_EXIT_CODE)

"""Starts the runs of an experiment as processes of `ds-finetune`, several at once on separate GPUs or hosts."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from ds_finetune.config.hostfile import read_hostfile, select_hosts
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
    """Devices on which one run of an experiment trains at a time. The run starts as `ds-finetune COMMAND RUN.yaml
    OPTIONS`.

    CUDA_VISIBLE_DEVICES of the run names `gpus`, which is empty for CPUs and for the hosts of a hostfile.
    """

    command: str = "train"
    options: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()


def run_slots(ranks: int, parallel: int = 1) -> list[RunSlot]:
    """Make `parallel` slots on this machine for runs of `ranks` ranks each. LaunchError if it has too few GPUs."""
    command, options = ("launch", ("--nproc", str(ranks))) if ranks > 1 else ("train", ())
    number = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number)))).split(",")[:number]
    if number and parallel * ranks > number:
        raise LaunchError(
            f"{parallel} parallel runs of {ranks} ranks each need {parallel * ranks} GPUs, but {number} are visible",
            hint="lower the number of parallel runs or of ranks, or set CUDA_VISIBLE_DEVICES to more GPUs",
        )
    return [RunSlot(command, options, tuple(names[each * ranks :][:ranks])) for each in range(parallel)]


def slot_on_hosts(hostfile: str, ranks: int) -> RunSlot:
    """Make a slot of `ranks` ranks on the first slots of the hosts of a hostfile. LaunchError if there are too few."""
    hosts, remaining, include = read_hostfile(hostfile), ranks, list[str]()
    for host in hosts:
        number = min(host.slots, remaining)
        include += [f"{host.name}:{','.join(map(str, range(number)))}"] * (number > 0)
        remaining -= number
    if remaining:
        raise LaunchError(f"{hostfile} has {ranks - remaining} slots, too few for {ranks} ranks", hint="lower --ranks")
    select_hosts(hosts, include="@".join(include))
    return RunSlot("launch", ("--hostfile", hostfile, "--include", "@".join(include)))


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
            raise ConfigError(f"--steps {self.steps} is too few to measure", hint=f"set it to {fewest_steps} or more")
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


class ExperimentRun:
    """A run of an experiment with the run file `tree`. In `folder` it writes the files `run.yaml` and `output.log`,
    and its output directory `run`.

    A run that the folder holds already is resumed from its checkpoints, or started again if it has none. If this
    process ends for any reason, even kill -9, the kernel sends SIGTERM to the run, which then saves and ends.

    Once the run has ended, `seconds` is its duration, `code` its exit code, and `reason` why it failed, if it did.
    """

    def __init__(self, folder: Path, tree: dict[str, Any]) -> None:
        self.folder, self.tree = folder, tree
        self.metrics = MetricsReader(folder / RUN / METRICS)
        self.seconds, self.code, self.reason = 0.0, 0, ""

    def start(self, slot: RunSlot) -> bool:
        """Start the run in `slot`. Returns False while a process of an earlier experiment writes to the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOG).open("ab") as log:
            # The process of the run, and those that it starts, inherit this lock.
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:
                pass  # The file system has no locks.
            if (self.folder / RUN).exists() and not (self.folder / RUN / CHECKPOINTS).is_dir():
                # The run starts again, because training would refuse an existing run folder without checkpoints.
                shutil.rmtree(self.folder / RUN)
            replace_file(self.folder / RUN_FILE, yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True))
            self.process = subprocess.Popen(
                [*_PROGRAM, slot.command, str(self.folder / RUN_FILE), *slot.options],
                env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)} if slot.gpus else {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        self._began = time.monotonic()
        return True

    def update(self) -> bool:
        """Read new metrics. Returns whether the run has ended."""
        has_ended = self.process.poll() is not None
        self.metrics.update()
        if has_ended:
            self.seconds, self.code = time.monotonic() - self._began, self.process.returncode
        if has_ended and self.code:
            lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
            text = " / ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
            how = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
            self.reason = f"{how}: {text}"
        return has_ended

    @property
    def has_diverged(self) -> bool:
        """Whether the run diverged: it failed, and its last step was skipped because the gradient was not finite."""
        skipped = self.metrics.curves.get("train/skipped")
        return self.code != 0 and skipped is not None and skipped.last > 0


def run_all(runs: Iterator[ExperimentRun], slots: Sequence[RunSlot]) -> None:
    """Train all runs, each in the next free slot.

    After SIGINT, SIGTERM or SIGHUP the runs save and end, and SystemExit with the code of an interrupted run is raised.
    After a second signal SystemExit is raised at once. If a run or the iterator raises an error, the runs save and end
    before the error is raised.
    """
    active, signals = dict[ExperimentRun, RunSlot](), list[int]()
    with handle_signals(signals.append):
        try:
            _train_all(runs, list(slots), active, signals)
        finally:
            for run in active:
                run.process.terminate()
            while len(signals) < 2 and any(run.process.poll() is None for run in active):
                time.sleep(_POLL_SECONDS)
    if signals:
        raise SystemExit(INTERRUPTED_EXIT_CODE)


def _train_all(
    runs: Iterator[ExperimentRun], free: list[RunSlot], active: dict[ExperimentRun, RunSlot], signals: Sequence[int]
) -> None:
    waiting: ExperimentRun | None = None
    while not signals:
        while free and (run := waiting or next(runs, None)) is not None:
            if run.start(free[0]):
                active[run], waiting = free.pop(0), None
            elif waiting is None:
                show_line(f"waiting for an earlier process that still writes to {run.folder / RUN}")
                waiting = run
            else:
                break
        if not active and waiting is None:
            return
        free += [active.pop(run) for run in list(active) if run.update()]
        time.sleep(_POLL_SECONDS)

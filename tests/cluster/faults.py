"""What can go wrong on the hosts of a run, done to them for real, and what was left of the run afterwards.

`python -m tests.cluster.faults --tries 10` does each fault that often at random moments and prints a table.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ds_finetune.system.rank_files import RUN_ID
from tests.cluster.bed import NETWORK, Bed
from tests.running import tiny_task

STEPS, EVERY = 80, 10
PATIENCE_SECONDS = 400.0
"""For what a run does by itself; a loaded machine may take minutes for it."""
LIMIT = 30.0
"""Seconds in which nothing may be left of a run after a fault."""
VICTIM = 2
"""The host that a fault is done to."""


@dataclass
class Launched:
    """A run that `ds-finetune launch` was started for on the first hosts of a bed."""

    bed: Bed
    process: "subprocess.Popen[str]"
    folder: Path

    def wait_for_step(self, step: int, seconds: float = PATIENCE_SECONDS) -> None:
        """Until the metrics have this step."""
        until = time.monotonic() + seconds
        while self.step() < step:
            assert time.monotonic() < until, f"step {self.step()} of {step}"
            assert self.process.poll() is None, self.said()
            time.sleep(0.05)

    def wait_for(self, text: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Until this was printed."""
        until = time.monotonic() + seconds
        while text not in self.said():
            assert time.monotonic() < until, self.said()
            time.sleep(0.1)

    def step(self) -> int:
        """Steps recorded so far."""
        records = self.records()
        return int(records[-1]["step"]) if records else 0

    def records(self) -> list[dict[str, Any]]:
        """The records of the run."""
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return [
                json.loads(line)
                for line in (self.folder / "metrics.jsonl").read_text().splitlines()
                if line.endswith("}")
            ]
        return []

    def said(self) -> str:
        """Everything that was printed so far."""
        return self.output.read_text()

    @property
    def output(self) -> Path:
        """Where the launching program prints."""
        return self.folder.with_name("launch.txt")

    def run_id(self) -> str:
        """The run's id, as it was printed."""
        found = re.search(r"^run (\S+):", self.said(), re.MULTILINE)
        assert found, self.said()
        return found[1]

    def left(self) -> list[int]:
        """Processes of this run on any host, ended ones that nobody has taken note of left out."""
        run_id = self.run_id()
        return [
            pid
            for pid in _pids()
            if (f"{RUN_ID}={run_id}" in _environ(pid) or f"host_functions {run_id}." in _command(pid))
            and _state(pid) not in "ZX"
        ]

    def processes(self, host: int, word: str) -> list[int]:
        """Processes of this run on a host that have `word` in their command; of agents and sshd, those of any run."""
        found = [pid for pid in self.bed.hosts[host - 1].pids() if word in _command(pid) and _state(pid) not in "ZX"]
        ours = set(self.left())
        return sorted(pid for pid in found if pid in ours or not ours.intersection(found))


@contextlib.contextmanager
def launched(
    bed: Bed,
    task: Path,
    *overrides: str,
    slots: tuple[int, ...] = (1, 1),
    ssh_args: str = "",
) -> Iterator[Launched]:
    """Start a run in the background; it is ended at the end. Its folder is shared, or each host's own with an
    `output_dir` there.
    """
    is_own = any(word == f"output_dir={bed.own}/run" for word in overrides)
    folder = bed.folder / "own-1" / "run" if is_own else task.parent / "run"
    shutil.rmtree(folder, ignore_errors=True)
    argv = [
        sys.executable,
        "-m",
        "ds_finetune",
        "launch",
        str(task),
        *overrides,
        "--hostfile",
        str(bed.hostfile(*slots)),
    ]
    output = folder.with_name("launch.txt")
    with output.open("w") as file:
        environ = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "DS_FINETUNE_SSH_ARGS": f"-F {bed.ssh_config} {ssh_args}",
        }
        process = subprocess.Popen(
            bed.command(1, argv),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environ,
            preexec_fn=_heed_interrupts,
        )
    run = Launched(bed, process, folder)
    try:
        yield run
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for pid in run.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _heed_interrupts() -> None:
    """As a program at a terminal does, whatever this process was told to ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def fault_task(folder: Path, **sections: Any) -> Path:
    """A run of some seconds that saves often."""
    parts: dict[str, Any] = {
        "train": {"for": f"{STEPS} steps"},
        "checkpoint": {"every": f"{EVERY} steps"},
        "eval": {"keep_best": False},
    }
    return tiny_task(folder, **{name: parts.get(name, {}) | sections.get(name, {}) for name in {**parts, **sections}})


def kill_rank(run: Launched) -> None:
    """As the system does to a process when memory runs out."""
    os.kill(run.processes(VICTIM, "ds_finetune.cluster.worker")[-1], signal.SIGKILL)


def kill_agent(run: Launched) -> None:
    """The agent of a host."""
    os.kill(run.processes(VICTIM, "ds_finetune.cluster.host_functions")[-1], signal.SIGKILL)


def kill_connection(run: Launched) -> None:
    """The sshd process of the connection; the one that listens goes on."""
    listening = run.bed.hosts[VICTIM - 1].sshd.pid
    os.kill(next(pid for pid in run.processes(VICTIM, "sshd") if pid != listening), signal.SIGKILL)


def kill_launcher(run: Launched) -> None:
    """The launching program itself."""
    run.process.kill()


def interrupt(run: Launched) -> None:
    """Ctrl-C at the launching program."""
    run.process.send_signal(signal.SIGINT)


def stop_rank(run: Launched) -> None:
    """The process of a rank is stopped, and nobody continues it."""
    os.kill(run.processes(VICTIM, "ds_finetune.cluster.worker")[-1], signal.SIGSTOP)


def pull_cable(run: Launched) -> None:
    """The host goes on and hears nobody."""
    run.bed.cable(VICTIM, plugged=False)


def crash_host(run: Launched) -> None:
    """Every process of the host is gone and nobody is told."""
    run.bed.crash(VICTIM)


def fill_disk(run: Launched) -> None:
    """Of the folder that is the host's own, a small file system in memory; what older checkpoints give back is taken as
    well.
    """
    fill = f"dd if=/dev/zero of={run.bed.own}/filler bs=4k oflag=append conv=notrunc"
    subprocess.Popen(
        run.bed.command(VICTIM, ["sh", "-c", f"for i in $(seq 600); do {fill} 2>/dev/null; sleep 0.05; done"])
    )


def use_up_memory(run: Launched) -> None:
    """The rank may not have one more page: the kernel ends it."""
    group = Path(_MEMORY) / f"ds-finetune-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text("65536")
    (group / "cgroup.procs").write_text(str(run.processes(VICTIM, "ds_finetune.cluster.worker")[-1]))


_MEMORY = "/sys/fs/cgroup/memory"
"""Where memory is limited, by version 1 of control groups."""


@dataclass(frozen=True)
class Fault:
    """What is done to a launched run, what the launching program must print of it, and in how many seconds nothing
    may be left.
    """

    do: Callable[[Launched], None]
    named: str
    within: float = LIMIT


_HOST = rf"host {re.escape(NETWORK)}\.{VICTIM} failed first"
_RANK = rf"rank 1 on {re.escape(NETWORK)}\.{VICTIM} failed first"
FAULTS = {
    "rank killed": Fault(kill_rank, rf"{_RANK}: was killed by SIGKILL"),
    "agent killed": Fault(kill_agent, f"{_HOST}: its agent or the connection has ended"),
    "connection killed": Fault(kill_connection, f"{_HOST}: ssh: Connection to .* closed"),
    "launcher killed": Fault(kill_launcher, ""),
    "interrupted": Fault(interrupt, "the same command resumes the run"),
    "rank stopped": Fault(stop_rank, r"rank 1 \(host .* sends no heartbeats"),
    "cable pulled": Fault(pull_cable, _HOST, 45.0),
    "host crashed": Fault(crash_host, _HOST),
    "disk full": Fault(fill_disk, rf"{_RANK}[\s\S]*(No space left|disk)"),
    "out of memory": Fault(use_up_memory, rf"{_RANK}: was killed by SIGKILL"),
}


@dataclass(frozen=True)
class Seen:
    """What came of one fault."""

    fault: str
    at_step: int
    code: int
    seconds_to_none_left: float
    left: int
    said: str

    @property
    def wrong(self) -> list[str]:
        """Each expectation of the fault that does not hold."""
        fault = FAULTS[self.fault]
        return [
            *(["exit code 0"] if self.code == 0 else []),
            *([f"{self.left} processes left after {fault.within:.0f} s"] if self.left else []),
            *([] if re.search(fault.named, self.said) else [f"not said: {fault.named}"]),
        ]


def inflict(bed: Bed, task: Path, fault: str, *, at_step: int) -> Seen:
    """Launch, do `fault` once `at_step` is recorded, and see what is left; the bed is whole again afterwards."""
    own = (
        (f"output_dir={bed.own}/run", "checkpoint.node_local=true", "checkpoint.max_failed=1")
        if fault == "disk full"
        else ()
    )
    if own:
        bed.run(VICTIM, ["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(bed.own)], timeout=10)
    with launched(bed, task, *own) as run:
        run.wait_for_step(at_step)
        at, step = time.monotonic(), run.step()
        FAULTS[fault].do(run)
        while run.left() and time.monotonic() - at < FAULTS[fault].within:
            time.sleep(0.1)
        none_left = time.monotonic() - at
        left = len(run.left())
        code = run.process.wait(LIMIT)
        seen = Seen(fault, step, code, none_left, left, run.said())
    repair(bed, fault)
    return seen


@dataclass(frozen=True)
class Resumed:
    """How a run went on after one fault."""

    fault: str
    at_step: int
    code: int
    from_step: int
    seconds: float
    """From the fault to the first step that had not been done before."""
    off: float
    """Largest difference of a loss from the undisturbed run's."""


def survive(bed: Bed, task: Path, fault: str, *, at_step: int, undisturbed: list[float]) -> Resumed:
    """Launch with one restart and hosts that may be missing, do `fault`, and let the run go on to its end."""
    with launched(bed, task, "launch.restarts=1", "launch.min_hosts=1") as run:
        run.wait_for_step(at_step)
        at, step = time.monotonic(), run.step()
        FAULTS[fault].do(run)
        run.wait_for("resuming from", 90)
        run.wait_for_step(step + 1)
        seconds = time.monotonic() - at
        code = run.process.wait(120)
        found = re.search(r"^resuming from .*, step (\d+) of", run.said(), re.MULTILINE)
        assert found
        losses = [record["train/loss"] for record in run.records()]
        off = max(abs(a - b) for a, b in zip(losses, undisturbed, strict=True))
        seen = Resumed(fault, step, code, int(found[1]), seconds, off)
    repair(bed, fault)
    return seen


def losses_undisturbed(bed: Bed, task: Path) -> list[float]:
    """Losses of the run on both hosts when nothing happens."""
    with launched(bed, task) as run:
        assert run.process.wait(PATIENCE_SECONDS) == 0, run.said()
        return [record["train/loss"] for record in run.records()]


def repair(bed: Bed, fault: str) -> None:
    """Make a bed whole again."""
    if fault == "cable pulled":
        bed.cable(VICTIM, plugged=True)
    elif fault == "host crashed":
        bed.repair(VICTIM)
    elif fault == "disk full":
        bed.run(VICTIM, ["sh", "-c", f"pkill -f '[s]eq 600'; umount -l {bed.own}"], timeout=10)
    elif fault == "out of memory":
        (Path(_MEMORY) / f"ds-finetune-{os.getpid()}").rmdir()


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environ(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return ""


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def main() -> None:
    """Do each fault `--tries` times at random steps and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restart", action="store_true", help="let the run start again and go on to its end")
    parser.add_argument("faults", nargs="*", default=list(FAULTS))
    chosen = parser.parse_args()
    drawn = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as folder, Bed(Path(folder) / "bed", 2) as bed:
        task = fault_task(bed.shared / "task")
        undisturbed = losses_undisturbed(bed, task) if chosen.restart else []
        all_seen: list[Seen] = []
        for fault, _ in product(chosen.faults, range(chosen.tries)):
            at_step = drawn.randrange(1, STEPS - 20)
            if chosen.restart:
                line = _resumed_line(
                    survive(bed, task, fault, at_step=max(at_step, EVERY + 2), undisturbed=undisturbed)
                )
            else:
                all_seen.append(inflict(bed, task, fault, at_step=at_step))
                line = _line(all_seen[-1])
            sys.stdout.write(f"{fault:18} {line}\n")
            sys.stdout.flush()
    for fault in dict.fromkeys(seen.fault for seen in all_seen):
        of_fault = [seen for seen in all_seen if seen.fault == fault]
        right, longest = sum(not seen.wrong for seen in of_fault), max(seen.seconds_to_none_left for seen in of_fault)
        sys.stdout.write(f"{fault:18} {right} of {len(of_fault)} as expected, nothing left after {longest:.1f} s\n")
    sys.exit(any(seen.wrong for seen in all_seen))


def _line(seen: Seen) -> str:
    first = re.search(r"^attempt 1 failed.*$", seen.said, re.MULTILINE)
    none_left = f"none left after {seen.seconds_to_none_left:4.1f} s ({seen.left} left)"
    verdict = "; ".join((*seen.wrong, seen.said[-800:])) if seen.wrong else "as expected"
    return f"step {seen.at_step:3}  code {seen.code:4}  {none_left}  {first[0] if first else ''}  {verdict}"


def _resumed_line(seen: Resumed) -> str:
    lost = f"step {seen.at_step:3} lost {seen.at_step - seen.from_step:2} steps"
    return f"{lost}  went on after {seen.seconds:5.1f} s  code {seen.code}  losses off by {seen.off:.1e}"


if __name__ == "__main__":
    main()

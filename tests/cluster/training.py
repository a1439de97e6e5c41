"""A tiny run on the hosts of a test bed: what travels to them, and the same run on one host to compare with."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_finetune.cluster.launch.commands import Job
from ds_finetune.cluster.launch.environment import carried_variables
from tests.cluster.bed import INTERFACE, Bed
from tests.conftest import ROOT
from tests.running import metrics, skip_without, start, tiny_task, torchrun

ENTRY = ("-m", "ds_finetune", "train")
ZERO3 = {"zero_optimization": {"stage": 3}}
STEPS_SECONDS = 400


def traveling() -> dict[str, str]:
    """What of this process's environment travels, on the CPU accelerator."""
    settings = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return carried_variables(os.environ | settings).values


def name_hosts(bed: Bed, names: Sequence[str]) -> None:
    """Let a name lead to the address of each host, on every host."""
    lines = [f"{host.address} {name}\n" for host, name in zip(bed.hosts, names, strict=False)]
    (bed.shared / "names").write_text("".join(["127.0.0.1 localhost\n", *lines]))
    for number in range(1, len(bed.hosts) + 1):
        assert bed.run(number, ["mount", "--bind", str(bed.shared / "names"), "/etc/hosts"], timeout=10).returncode == 0


def job_on(bed: Bed, run_file: Path, *slots: int) -> Job:
    """The ranks of a run file on the first hosts of a bed."""
    hosts = bed.as_hosts(*slots)
    return Job(
        str(run_file),
        (),
        hosts,
        "test",
        hosts[0].name,
        29_600,
        traveling() | {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE},
        str(ROOT),
        sys.executable,
        ENTRY,
    )


def documented(heading: str) -> str:
    """The first block of code under a heading of the how-to page on several machines."""
    page = (ROOT / "docs" / "how-to" / "several-machines.md").read_text()
    match = re.search(rf"^## {heading}.*?^```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert match
    return match[1]


def losses_of_two_ranks(folder: Path) -> list[float]:
    """Losses of the ZeRO-3 run with two ranks on one host."""
    done = start(torchrun("ds_finetune/train.py", str(tiny_task(folder, deepspeed=ZERO3))))
    assert done.returncode == 0, done.stdout + done.stderr
    return [record["train/loss"] for record in metrics(folder)]


def ranks_of(bed: Bed, number: int) -> list[int]:
    """Processes of a host that are ranks of a run."""
    return [
        pid
        for pid in bed.hosts[number - 1].pids()
        if (words := _words(pid)) and words[0].endswith("python") and words[2:5] == list(ENTRY)
    ]


def processes_with(bed: Bed, text: str) -> list[int]:
    """Processes of all hosts in whose command line `text` stands, launchers and their shells left out."""
    return [
        pid
        for host in bed.hosts
        for pid in host.pids()
        if (words := _words(pid)) and words[0].endswith("python") and text in " ".join(words)
    ]


def _words(pid: int) -> list[str]:
    """A process's command line; empty where it has ended."""
    place = Path("/proc") / str(pid) / "cmdline"
    try:
        return place.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


@dataclass
class Started:
    """A launcher's process, and the run folder to watch."""

    process: "subprocess.Popen[str]"
    folder: Path

    def wait_for_steps(self) -> None:
        """Return when the first step is recorded."""
        self.until(lambda: (self.folder / "run" / "metrics.jsonl").exists() and len(metrics(self.folder)) > 0)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait, while the launcher runs."""
        end = time.monotonic() + STEPS_SECONDS
        while not is_so():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.2)


def started(bed: Bed, argv: Sequence[str], environ: dict[str, str], folder: Path, *, number: int = 1) -> Started:
    """Start a launcher on a host, the first by default."""
    skip_without(argv[0])
    # A command that enters a host begins at its root.
    command = bed.command(number, ["env", f"--chdir={ROOT}", *argv])
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    return Started(process, folder)

"""A real Slurm on three hosts: srun in an allocation, the documented script under sbatch, a killed rank, and a job out of
time.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ds_finetune.cluster.launch.commands import Job
from ds_finetune.config.hostfile import Host
from tests.cluster.bed import Bed
from tests.cluster.slurm import Slurm, allocate, why_no_slurm
from tests.cluster.training import ZERO3, documented, job_on, losses_of_two_ranks, ranks_of, started, traveling
from tests.running import metrics, tiny_task

SECONDS = 200
LONG = {"for": "5000 steps"}
NODES = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(bed: Bed) -> Iterator[Slurm]:
    reason = why_no_slurm()
    if reason:
        pytest.skip(f"no Slurm: {reason}")
    with Slurm(bed) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of_two_ranks(tmp_path_factory.mktemp("one"))


def _job(bed: Bed, run_file: Path) -> Job:
    """Slurm's names, the second node first."""
    job = job_on(bed, run_file, 1, 1)
    return replace(job, hosts=(Host("n2", 1, 1), Host("n1", 1, 2)), master_addr="n2")


def test_srun_trains_on_two_hosts_as_on_one(bed: Bed, slurm: Slurm, wanted: list[float]) -> None:
    folder = bed.shared / "srun"
    job = _job(bed, tiny_task(folder, deepspeed=ZERO3))
    run = started(bed, allocate(slurm, job), os.environ | traveling() | slurm.environ, folder)
    printed = run.process.communicate(timeout=SECONDS)[0]
    assert run.process.returncode == 0, printed + slurm.logs()
    assert "started by srun" in printed
    assert [record["train/loss"] for record in metrics(folder)] == pytest.approx(wanted, abs=2e-6)


def test_a_killed_rank_ends_all(bed: Bed, slurm: Slurm) -> None:
    folder = bed.shared / "killed"
    job = _job(bed, tiny_task(folder, deepspeed=ZERO3, train=LONG))
    run = started(bed, allocate(slurm, job), os.environ | traveling() | slurm.environ, folder)
    run.wait_for_steps()
    (pid,) = ranks_of(bed, 1)
    os.kill(pid, signal.SIGKILL)
    since = time.monotonic()
    printed = run.process.communicate(timeout=60)[0]
    assert run.process.returncode not in (0, None), printed
    while (ranks_of(bed, 1) or ranks_of(bed, 2)) and time.monotonic() - since < 120:
        time.sleep(0.2)
    assert ranks_of(bed, 1) + ranks_of(bed, 2) == []
    assert time.monotonic() - since < 120


def _script(bed: Bed, folder: Path, **sections: object) -> str:
    """The documented script with the values of a tiny run, in a file."""
    run_file = str(tiny_task(folder, deepspeed=ZERO3, **sections))
    script = documented("Slurm").replace("--nodes=4 --ntasks-per-node=8 --cpus-per-task=8 --gpus-per-node=8", NODES)
    script = script.replace("ds-finetune", f"{sys.executable} -m ds_finetune").replace("RUN.yaml", run_file)
    assert NODES in script
    assert run_file in script
    (folder / "job.sh").write_text(script)
    return str(folder / "job.sh")


def test_the_documented_script_trains(bed: Bed, slurm: Slurm, wanted: list[float]) -> None:
    folder = bed.shared / "sbatch"
    script = _script(bed, folder)
    done = slurm.run(["sbatch", "--wait", f"--output={folder}/log", script], traveling(), timeout=SECONDS)
    log = (folder / "log").read_text()
    assert done.returncode == 0, done.stderr + log + slurm.logs()
    assert "started by srun" in log
    assert [record["train/loss"] for record in metrics(folder)] == pytest.approx(wanted, abs=2e-6)


def test_a_script_that_fails_is_not_queued_again(bed: Bed, slurm: Slurm) -> None:
    folder = bed.shared / "fails"
    script = _script(bed, folder, data={"train": "nowhere.jsonl"})
    done = slurm.run(["sbatch", "--wait", f"--output={folder}/log", script], traveling(), timeout=SECONDS)
    assert done.returncode != 0
    assert "nowhere.jsonl" in (folder / "log").read_text()
    assert slurm.run(["squeue", "--noheader"], timeout=20).stdout == ""


def test_out_of_time_it_saves_and_is_queued_again(bed: Bed, slurm: Slurm) -> None:
    """The signal of `#SBATCH --signal` comes by the minute, so the test sends it: to the script alone, as `B:` says."""
    folder = bed.shared / "signalled"
    script = _script(bed, folder, train=LONG)
    job = slurm.run(["sbatch", "--parsable", f"--output={folder}/log", script], traveling(), timeout=20).stdout.strip()
    until = time.monotonic() + SECONDS
    while not (folder / "run" / "metrics.jsonl").exists():
        assert time.monotonic() < until, (folder / "log").read_text() + slurm.logs()
        time.sleep(0.3)
    assert slurm.run(["scancel", "--batch", "--signal=TERM", job], timeout=20).returncode == 0
    while "Restarts=1" not in (shown := slurm.run(["scontrol", "show", "job", job], timeout=20).stdout):
        assert time.monotonic() < until, (folder / "log").read_text() + shown
        time.sleep(0.3)
    slurm.run(["scancel", job], timeout=20)
    log = (folder / "log").read_text()
    assert "SIGUSR1" in log
    saved = [
        int(path.name.split("-")[-1])
        for path in (folder / "run" / "checkpoints").iterdir()
        if re.fullmatch(r"step-\d+", path.name)
    ]
    assert saved, log
    assert max(saved) == metrics(folder)[-1]["step"]

"""mpirun over ssh on two hosts: the same losses as one host, and an end of all when a rank is killed."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ds_finetune.cluster.launch.commands import mpirun_command, starting_environment
from tests.cluster.bed import Bed
from tests.cluster.training import ZERO3, job_on, losses_of_two_ranks, ranks_of, started
from tests.running import metrics, tiny_task

SECONDS = 200
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of_two_ranks(tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first host first", "the other host first"])
def test_two_hosts_train_as_one(bed: Bed, wanted: list[float], order: tuple[int, int]) -> None:
    folder = bed.shared / f"run{order[0]}"
    job = job_on(bed, tiny_task(folder, deepspeed=ZERO3), 1, 1)
    hosts = tuple(job.hosts[place] for place in order)
    job = replace(job, hosts=hosts, master_addr=hosts[0].name)
    run = started(bed, mpirun_command(job, ["-F", str(bed.ssh_config)]), starting_environment(job, os.environ), folder)
    printed = run.process.communicate(timeout=SECONDS)[0]
    assert run.process.returncode == 0, printed
    assert "started by mpirun" in printed
    assert [record["train/loss"] for record in metrics(folder)] == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize("number", [1, 2])
def test_a_killed_rank_ends_all(bed: Bed, number: int) -> None:
    folder = bed.shared / f"killed{number}"
    job = job_on(bed, tiny_task(folder, deepspeed=ZERO3, train={"for": "5000 steps"}), 1, 1)
    run = started(bed, mpirun_command(job, ["-F", str(bed.ssh_config)]), starting_environment(job, os.environ), folder)
    run.wait_for_steps()
    (pid,) = ranks_of(bed, number)
    os.kill(pid, signal.SIGKILL)
    since = time.monotonic()
    printed = run.process.communicate(timeout=60)[0]
    assert run.process.returncode not in (0, None), printed
    while (ranks_of(bed, 1) or ranks_of(bed, 2)) and time.monotonic() - since < 120:
        time.sleep(0.2)
    assert ranks_of(bed, 1) + ranks_of(bed, 2) == []
    assert time.monotonic() - since < 120


def test_a_host_that_is_not_there(bed: Bed, tmp_path: Path) -> None:
    job = job_on(bed, tiny_task(tmp_path), 1, 1)
    gone = (job.hosts[0], replace(job.hosts[1], name="10.77.0.99"))
    run = started(
        bed,
        mpirun_command(replace(job, hosts=gone), ["-F", str(bed.ssh_config), "-oConnectTimeout=5"]),
        starting_environment(job, os.environ),
        tmp_path,
    )
    assert run.process.wait(60) != 0
    assert not (tmp_path / "run").exists()

"""Faults on the hosts of a run: how it ends everywhere, what is said of it, and how it goes on. More kinds and tries:
scripts/faults.sh.
"""

import re
import signal
import sys
from pathlib import Path

import pytest

from ds_finetune.errors import INTERRUPTED_EXIT_CODE, USER_ERROR_EXIT_CODE
from tests.cluster.bed import Bed
from tests.cluster.faults import (
    FAULTS,
    PATIENCE_SECONDS,
    STEPS,
    VICTIM,
    Launched,
    fault_task,
    inflict,
    kill_rank,
    launched,
    pull_cable,
    repair,
)
from tests.running import metrics, start

AGAIN = "launch.restarts=2"
TOLERANCE = 2e-5
"""Of losses on one rank and on two, in fp32 over a hundred steps."""


@pytest.fixture(scope="module")
def task(bed: Bed) -> Path:
    """A run that saves every ten steps, in a folder that all hosts share."""
    return fault_task(bed.shared / "task")


def _losses(run: Launched) -> list[float]:
    records = run.records()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["train/loss"] for record in records]


def test_a_killed_rank_is_named_and_the_run_goes_on_until_ctrl_c_saves(bed: Bed, task: Path, tmp_path: Path) -> None:
    """Steps between the last checkpoint and the fault are done twice, with the same losses, which are those of one
    process. Its end is behind the marker: test_a_lost_host_is_done_without.
    """
    alone = fault_task(tmp_path, checkpoint={"every": f"{STEPS} steps"}, export={"at_end": False})
    done = start([sys.executable, "ds_finetune/train.py", str(alone)])
    assert done.returncode == 0, done.stderr
    wanted = [record["train/loss"] for record in metrics(tmp_path)]
    with launched(bed, task, AGAIN) as run:
        run.wait_for_step(36)
        kill_rank(run)
        before = {record["step"]: record["train/loss"] for record in run.records()}
        run.wait_for("resuming from")
        run.wait_for_step(max(run.step(), max(before)) + 5)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(PATIENCE_SECONDS) == INTERRUPTED_EXIT_CODE, run.said()
        said = run.said()
        assert "the same command resumes the run" in said
        assert run.step() % 10 or (run.folder / f"checkpoints/step-{run.step():06}").is_dir()
        assert re.search(
            rf"^attempt 1 failed after .* s: rank 1 on {bed.hosts[1].address} failed first: was killed by SIGKILL",
            said,
            re.MULTILINE,
        )
        assert re.search(r"^  \| ", said, re.MULTILINE)
        resumed = re.search(r"^resuming from .*, step (\d+) of", said, re.MULTILINE)
        assert resumed
        assert 10 <= int(resumed[1]) <= 36
        records = run.records()
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))
        losses = [record["train/loss"] for record in records]
        assert losses[: len(before)] == pytest.approx(list(before.values()), abs=1e-6)
        assert losses == pytest.approx(wanted[: len(losses)], abs=TOLERANCE)
        assert not run.left()


@pytest.mark.slow
def test_a_lost_host_is_done_without(bed: Bed, task: Path) -> None:
    """Once it is back, the same command resumes on both hosts."""
    with launched(bed, task, AGAIN, "launch.min_hosts=1", "launch.silent_seconds=4", "train.for=600 steps") as run:
        run.wait_for_step(15)
        pull_cable(run)
        run.wait_for("starting again, restart 1 of 2")
        assert f"host {bed.hosts[1].address} failed first: ssh: Timeout" in run.said()
        run.wait_for("resuming from")
        run.wait_for_step(run.step() + 5)
        assert not run.processes(VICTIM, "ds_finetune.cluster.worker")
        repair(bed, "cable pulled")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(PATIENCE_SECONDS) == INTERRUPTED_EXIT_CODE, run.said()
        records = run.records()
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_left_after(bed: Bed, task: Path, fault: str) -> None:
    if fault == "out of memory" and not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists():
        pytest.skip("no control groups of version 1 for memory here")
    seen = inflict(bed, task, fault, at_step=20)
    assert not seen.wrong, seen.said


@pytest.mark.slow
def test_another_run_on_the_same_hosts_is_left_alone(bed: Bed, task: Path) -> None:
    other = fault_task(bed.shared / "other")
    with launched(bed, task) as run, launched(bed, other) as beside:
        run.wait_for_step(10)
        kill_rank(run)
        assert run.process.wait(60) != 0
        assert not run.left()
        assert beside.process.wait(PATIENCE_SECONDS) == 0, beside.said()
        _losses(beside)


def test_hosts_that_are_not_ready_start_nothing(bed: Bed, task: Path) -> None:
    bed.crash(VICTIM)
    try:
        with launched(bed, task, slots=(1, 1, 1), ssh_args="-o ConnectTimeout=5") as run:
            assert run.process.wait(PATIENCE_SECONDS) == USER_ERROR_EXIT_CODE
            assert "1 of 3 hosts are not ready, nothing was started" in run.said()
            assert re.search(r"10\.77\.0\.2 \(line 2\): ssh: .*(No route|timed out)", run.said()), run.said()
            assert not (run.folder / "metrics.jsonl").exists()
    finally:
        repair(bed, "host crashed")

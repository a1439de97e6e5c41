"""A rank that stops, sleeps, goes astray, is killed or fails: the run ends by itself, and says which rank it was."""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.watchdog.faults import FAULTY, LIMIT_SECONDS, faulty
from tests.conftest import ROOT
from tests.running import metrics, start, tiny_task, torchrun

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are told apart by /proc")

GIVEN_SECONDS = 100
"""What an end may take beyond the limit where there is one."""
KILLED = -signal.SIGKILL


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    done = faulty(tmp_path, "kill", overrides=("watchdog.limit=120 seconds",))
    assert done.codes == [1, KILLED]
    assert done.seconds[0] < GIVEN_SECONDS
    assert "rank 1 (host" in done.report
    assert "ended without a message: its process was killed by a signal" in done.report
    assert (done.status.state, done.status.reason) == ("failed", done.report.splitlines()[0])
    assert "error: rank 1 (host" in done.printed[0]
    assert "Traceback" not in done.printed[0]


def test_a_rank_that_sleeps_before_a_collective(tmp_path: Path) -> None:
    done = faulty(tmp_path, "sleep")
    assert done.codes == [1, 1]
    assert all(LIMIT_SECONDS < each < LIMIT_SECONDS + GIVEN_SECONDS for each in done.seconds)
    assert done.report.startswith("rank 1 (host")
    assert "rank 0 (host" in done.report
    assert (done.status.state, done.status.reason) == ("hung", done.report.splitlines()[0])
    assert re.search(r"waits in all_reduce of [\d,]+ bytes", done.report)
    assert "faulty.py" in done.stacks(1)
    assert " in sleep" in done.stacks(1)
    assert " in all_reduce" in done.stacks(0)


def test_a_paused_run_resumes_and_says_so(tmp_path: Path) -> None:
    """All ranks are stopped for longer than the limit and the time of their own timers together."""
    done = faulty(tmp_path, "pause", pause_seconds=LIMIT_SECONDS + 4)
    assert done.codes == [0, 0], done.printed
    assert len(metrics(tmp_path)) == 12
    assert not (tmp_path / "run" / "watchdog").exists()
    said = re.compile(r"watchdog: rank 0 was paused for (\d+) s and runs again")
    assert said.search(done.printed[0])
    assert "watchdog: rank 1 was paused for" in done.printed[1]
    logged = said.search((tmp_path / "run" / "log.txt").read_text())
    assert logged
    assert LIMIT_SECONDS + 3 <= int(logged[1]) < GIVEN_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["stop", "hold"])
def test_a_rank_that_cannot_answer(fault: str, rank: int, tmp_path: Path) -> None:
    """Stopped, or with Python's lock held in C: the other one says so, has its stacks written and ends it."""
    done = faulty(tmp_path, fault, rank=rank)
    assert done.codes[rank] == KILLED
    assert done.codes[1 - rank] == 1
    assert max(done.seconds) < LIMIT_SECONDS + GIVEN_SECONDS
    assert done.report.startswith(f"rank {rank} (host")
    assert "sends no heartbeats" in done.report
    assert "faulty.py" in done.stacks(rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_in_another_collective(rank: int, tmp_path: Path) -> None:
    done = faulty(tmp_path, "another", rank=rank, step=8)
    assert 0 not in done.codes
    assert max(done.seconds) < LIMIT_SECONDS + GIVEN_SECONDS
    # Of two ranks in different collectives none is in the majority, so both are named.
    assert done.report.startswith("ranks 0-1 (host")
    assert f"rank {rank} barrier" in done.report
    assert "in another" in done.stacks(rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_error_is_named_and_not_what_follows(rank: int, tmp_path: Path) -> None:
    done = faulty(tmp_path, "fail", rank=rank)
    assert done.codes == [1, 1]
    assert max(done.seconds) < GIVEN_SECONDS
    assert f"rank {rank} (host" in done.report
    assert "was the first to fail: OSError: [Errno 28] No space left on device" in done.report
    assert "No space left on device" in done.printed[rank]
    # Rank zero prints the report with the traceback of the first error; nothing is printed of the one that follows.
    assert "RuntimeError" not in done.printed[1 - rank].partition(f"rank {1 - rank} then failed")[0]
    # Rank one names the cause if it meets an error of its own before the watchdog ends it. On a busy machine it may not.
    is_silent = rank == 0 and not done.printed[1]
    assert is_silent or f"rank {rank} (host" in done.printed[1 - rank]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_start_is_no_hang(rank: int, tmp_path: Path) -> None:
    """What is prepared in twelve seconds is not held against a collective's four."""
    done = faulty(
        tmp_path,
        "prepare",
        rank=rank,
        step=12,
        overrides=("watchdog.collective=4 seconds", "train.for=2 steps", "watchdog.limit=never"),
    )
    assert done.codes == [0, 0], done.printed
    assert len(metrics(tmp_path)) == 2
    assert not (tmp_path / "run" / "watchdog").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_preparation_is_told_too(rank: int, tmp_path: Path) -> None:
    done = faulty(tmp_path, "full", rank=rank)
    assert done.codes == [1, 1]
    assert f"rank {rank} (host" in done.report
    assert "No space left on device" in done.report


def test_ranks_that_do_not_come_are_said(tmp_path: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29573"}
    done = start([sys.executable, "ds_finetune/train.py", str(tiny_task(tmp_path)), "watchdog.meet=1 second"], alone)
    assert done.returncode == 1
    assert "rank 0 has not reached the other ranks at 127.0.0.1:29573 within 0:00:01" in done.stderr
    assert "ranks 1 have not connected" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_slow_rank_is_named_and_ends_nothing(tmp_path: Path) -> None:
    done = faulty(tmp_path, "slow", step=2, overrides=("watchdog.limit=auto",))
    assert done.codes == [0, 0], done.printed
    assert "SLOW: rank 1 (host" in done.printed[0]
    ratios = [record["perf/straggler_ratio"] for record in metrics(tmp_path) if "perf/straggler_ratio" in record]
    assert len(ratios) == 7
    assert max(ratios) > 1.5


@pytest.mark.parametrize("with_torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_second_run_in_the_same_processes(with_torchrun: bool, tmp_path: Path) -> None:
    """Both runs meet in one store: that of torchrun's agent, or that of rank zero."""
    command = torchrun("tests/cluster/watchdog/twice.py", str(tiny_task(tmp_path)), str(tmp_path))
    done = start(command, {"PYTHONPATH": str(ROOT)}, fork=not with_torchrun)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = sorted(line for line in done.stdout.splitlines() if line.startswith("RUN"))
    assert ended == ["RUN 0 3"] * 2 + ["RUN 1 3"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "mpirun"])
def test_under_launchers(launcher: str, tmp_path: Path) -> None:
    given = [
        FAULTY,
        "sleep",
        "1",
        "4",
        str(tiny_task(tmp_path)),
        f"watchdog.limit={LIMIT_SECONDS} seconds",
        "train.for=12 steps",
    ]
    commands = {
        "torchrun": torchrun(*given),
        "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "29571", *given],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "python", *given],
    }
    done = start(commands[launcher], {"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert "watchdog: rank 1 (host" in done.stdout + done.stderr
    assert (tmp_path / "run" / "watchdog" / "report.txt").read_text().startswith("rank 1 (host")


@pytest.mark.slow
def test_torchrun_blames_the_rank_that_is_stopped(tmp_path: Path) -> None:
    """torchrun names the rank that ends first, so the watchdog kills the stopped rank before the other ranks end."""
    task = tiny_task(tmp_path, train={"global_batch_size": 6})
    settings = [f"watchdog.limit={LIMIT_SECONDS} seconds", "train.for=12 steps"]
    done = start(torchrun(FAULTY, "stop", "1", "4", str(task), *settings, ranks=3), fork=False)
    assert re.search(r"Root Cause.*\n\[0\]:\n.*\n.*\n *rank +: 1 ", done.stderr), done.stderr
    assert (tmp_path / "run" / "watchdog" / "report.txt").read_text().startswith("rank 1 (host")

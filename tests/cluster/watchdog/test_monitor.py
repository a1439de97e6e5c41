"""What ranks make of each other's heartbeats: who is named, what is reported, and who ends whom."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_finetune.cluster.watchdog import monitor as module
from ds_finetune.cluster.watchdog.endings import RankProcess, RunEnding
from ds_finetune.cluster.watchdog.monitor import (
    CLOSED,
    PREPARING_SECONDS,
    ROUND_SECONDS,
    SILENT,
    SILENT_SECONDS,
    Monitor,
    StackFile,
    start_monitor,
)
from ds_finetune.cluster.watchdog.progress import DONE, PREPARING, RUNNING, RankProgress
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.runs.folder import REPORT
from ds_finetune.system.processes import Pause
from ds_finetune.system.world import World
from tests.cluster.watchdog.ranks import Ranks

NEVER = WatchdogConfig(limit="100 seconds", start="100 seconds", other="100 seconds")
OVER = SILENT_SECONDS + 0.1
ROUND = ROUND_SECONDS + 2.1
"""Seconds after which rank zero waits no longer for heartbeats, with those for the cause of an error."""
LEAVES, ZERO_LEAVES = 2.5, 4.5
"""Seconds after which a rank without an error leaves a run that has failed, and after which rank zero does."""
HAS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are told apart by /proc")


class LeftError(BaseException):
    """Where the process would have ended."""


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which the process would have ended."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise LeftError

    monkeypatch.setattr(os, "_exit", leave)
    return codes


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that stands for that of a rank."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        yield child
        child.kill()


def test_ranks_that_are_done_leave_no_report(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for monitor in ranks.monitors:
        monitor._state = DONE
        monitor._is_closing = True
    ranks.beat()
    ranks.watch(after=10 * PREPARING_SECONDS)
    assert ranks.monitors[0]._stored_ending is None
    assert list(ranks.folder.iterdir()) == []


@HAS_PROC
@pytest.mark.parametrize("state", [RUNNING, DONE])
def test_a_process_that_has_ended_is_named_unless_its_rank_was_done(
    state: str, tmp_path: Path, process: "subprocess.Popen[bytes]"
) -> None:
    ranks = Ranks(tmp_path, pids=[os.getpid(), process.pid, os.getpid()])
    process.kill()
    process.wait()
    ranks.watch(0)
    # Rank zero reads the last heartbeat of rank 1 after it has seen that the process is gone.
    ranks.monitors[1]._state = state
    ranks.beat(1)
    ranks.beat(0)
    ranks.watch(0)
    ranks.beat(0)
    ranks.watch(0)
    if state == DONE:
        assert ranks.monitors[0]._stored_ending is None
        return
    ending = ranks.ending(0)
    assert (ending.at_fault, ending.code, ending.is_hang) == ((1,), 1, False)
    assert ending.line == f"rank 1 (host host-a, process {process.pid}) {CLOSED}"
    assert ending.line in ranks.report()


def test_each_wait_for_preparation_waits_for_every_rank(tmp_path: Path) -> None:
    ranks, store = Ranks(tmp_path, "ab"), dist.HashStore()
    first = threading.Thread(
        target=lambda: [ranks.monitors[0].wait_until_prepared(store) for _ in range(2)], daemon=True
    )
    first.start()
    ranks.monitors[1].wait_until_prepared(store)
    first.join(1)
    assert first.is_alive()
    ranks.monitors[1].wait_until_prepared(store)
    first.join(60)
    assert not first.is_alive()


def test_the_first_failure_is_the_cause_and_its_code_everyones(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.fail(2, "ModelError: no weights", is_secondary=False, code=7)
    ranks.fail(0, "KeyError: later", is_secondary=False)
    assert [(ranks.ending(rank).at_fault, ranks.ending(rank).code) for rank in range(3)] == [((2,), 7)] * 3
    assert "ModelError: no weights" in ranks.report()
    assert "later" not in ranks.report()


def test_a_users_mistake_leaves_no_report_and_no_stacks(left: list[int], tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.fail(2, "DataError: a row", is_secondary=False, code=2)
    assert ranks.ending(0).code == 2
    zero = ranks.monitors[0]
    with contextlib.closing(StackFile((ranks.folder / REPORT).parent, zero.progress)) as zero._stacks:
        ranks.watch(0)
        with pytest.raises(LeftError):
            ranks.watch(0, after=ZERO_LEAVES)
        assert list(ranks.folder.iterdir()) == []
    assert left == [2]


@pytest.mark.parametrize("meets_another_error", [False, True])
def test_the_first_rank_without_fault_prints_the_report(
    meets_another_error: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails, and rank 1 is the reporter. It does not leave before rank 0 of its machine, and it may meet an
    error in a collective with rank 0 before its thread ends the process.
    """
    printed: list[str] = []
    monkeypatch.setattr(module, "_print", printed.append)
    ranks = Ranks(tmp_path)
    ranks.fail(0, "OSError: No space left on device", is_secondary=False)
    ranks.beat()
    ranks.watch(1, 2)
    if meets_another_error:
        ranks.fail(1, "RuntimeError: gloo: Connection closed by peer", is_secondary=True)
    else:
        with pytest.raises(LeftError):
            ranks.watch(1, after=LEAVES)
    assert printed == [f"watchdog: {ranks.ending(1).report}\n"]


def test_an_error_that_follows_waits_for_its_cause(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.fail(0, "RuntimeError: gloo: Connection closed by peer", is_secondary=True)
    ranks.beat()
    ranks.watch(0)
    ranks.beat()
    ranks.watch(0)
    ranks.fail(1, "OSError: No space left on device", is_secondary=False)
    ranks.beat()
    ranks.watch(0, after=ROUND)
    assert ranks.ending(2).at_fault == (1,)


def test_an_error_without_a_cause_is_explained_by_what_all_do(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "ab")
    for rank, monitor in enumerate(ranks.monitors):
        with monitor.progress.collectives.record("all_reduce", 3 if rank else 2, "all"):
            pass
    ranks.fail(0, "RuntimeError: gloo: 24 vs 16", is_secondary=True)
    ranks.watch(0)
    ranks.monitors[0]._compare_at = time.monotonic()
    ranks.beat()
    ranks.watch(0)
    report = ranks.ending(1).report
    assert "rank 0 all_reduce of 2; rank 1 all_reduce of 3" in report
    assert report.count("24 vs 16") == 2
    assert not ranks.ending(1).is_hang


def test_a_broken_connection_without_a_cause_is_the_networks(tmp_path: Path) -> None:
    """All are in one collective; rank 1 has met an error of the network in it, and is in none afterwards."""
    ranks = Ranks(tmp_path)
    with contextlib.ExitStack() as waiting:
        for rank, monitor in enumerate(ranks.monitors):
            collective = monitor.progress.collectives.record("all_reduce", 2, "all")
            if rank == 1:
                with collective:
                    pass
            else:
                waiting.enter_context(collective)
        ranks.fail(1, "RuntimeError: gloo: Connection timed out", is_secondary=True)
        ranks.beat()
        ranks.watch(0)
        ranks.monitors[0]._compare_at = time.monotonic()
        ranks.beat()
        ranks.watch(0)
        ending = ranks.ending(2)
    assert (ending.at_fault, ending.is_silent) == ((), False)
    assert ending.line.startswith("no single rank: every rank waits at the same place; the connection between ranks")
    assert "met RuntimeError: gloo: Connection timed out" in ending.report


@HAS_PROC
def test_a_rank_that_hangs_without_heartbeats_is_ended_by_one_beside_it(
    left: list[int], tmp_path: Path, process: "subprocess.Popen[bytes]"
) -> None:
    process.send_signal(signal.SIGSTOP)
    ranks = Ranks(tmp_path, pids=[os.getpid(), process.pid, os.getpid()])
    ranks.hang(2, others=[2])
    ranks.watch(0)
    assert ranks.monitors[0]._stored_ending is None
    ranks.watch(0, after=ROUND)
    ending = ranks.ending(0)
    assert (ending.at_fault, ending.is_silent, ending.is_hang) == ((1,), True, True)
    assert ending.line == f"rank 1 (host host-a, process {process.pid}): {SILENT}"
    assert f"rank 1 (host host-a, process {process.pid}): no heartbeat" in ending.report
    assert f"{ranks.processes[2]} has made no progress within its limit of 100 s" in ending.report
    ranks.watch(0)
    # Rank 0 kills rank 1 at once, before rank 2 leaves: torchrun and mpirun blame the rank that ends first.
    with pytest.raises(LeftError):
        ranks.watch(0, after=0.1)
    assert left == [1]
    assert process.wait(60) in (-signal.SIGKILL, -signal.SIGQUIT)


def test_a_rank_of_another_machine_that_is_stuck_is_named_and_not_killed(
    left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "kill_process", lambda process, why: pytest.fail(why))
    ranks = Ranks(tmp_path, "aabb")
    ranks.hang(1, others=[1, 2])
    ranks.watch(0, after=ROUND)
    assert (ranks.ending(0).at_fault, ranks.ending(0).line) == ((3,), f"{ranks.processes[3]}: {SILENT}")
    ranks.watch(0)
    with pytest.raises(LeftError):
        ranks.watch(0, after=LEAVES)
    assert left == [1]


def test_a_rank_that_was_stopped_ends_itself_once_it_runs_again(left: list[int], tmp_path: Path) -> None:
    """It reads that it was at fault, and kills nobody."""
    ranks = Ranks(tmp_path, "ab")
    ranks.monitors[0]._propose(RunEnding((1,), "rank 1 is silent", is_hang=True, is_silent=True))
    ranks.beat(1)
    with pytest.raises(LeftError):
        ranks.watch(1, 1)
    assert left == [1]


def test_ranks_that_hang_after_rank_zero_is_done_are_compared(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.monitors[0]._is_closing, ranks.monitors[0]._state = True, DONE
    ranks.beat()
    ranks.hang(2, others=[1, 2])
    ranks.watch(0)
    assert ranks.ending(0).line == "no single rank: every rank waits at the same place"


def test_a_machine_without_heartbeats_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "aabb")
    ranks.monitors[0]._heard_at |= dict.fromkeys((0, 1), time.monotonic() + OVER)
    ranks.watch(0, after=OVER)
    ending = ranks.ending(0)
    assert (ending.at_fault, ending.is_silent) == ((2, 3), False)
    assert ending.line == f"ranks 2-3 (host host-b) {SILENT}, as seen from host host-a"
    assert ending.line in ranks.report()


@pytest.mark.parametrize("is_preparing", [False, True])
def test_a_machine_is_not_silent_while_one_of_its_ranks_is_heard_or_prepares(
    is_preparing: bool, tmp_path: Path
) -> None:
    """Native code may hold Python's lock, and only the limit says for how long."""
    ranks = Ranks(tmp_path, "abb")
    for monitor in ranks.monitors if is_preparing else ():
        monitor.progress.phase = PREPARING
    ranks.watch()
    ranks.beat()
    heard = (0,) if is_preparing else (0, 1)
    ranks.monitors[0]._heard_at |= dict.fromkeys(heard, time.monotonic() + OVER)
    ranks.watch(0, after=OVER)
    ranks.beat(0)
    assert ranks.monitors[0]._stored_ending is None


@pytest.mark.parametrize("late", [(2, 3), (0, 1, 2, 3), (1,)])
def test_late_heartbeats_of_another_machine_are_the_networks_fault(late: tuple[int, ...], tmp_path: Path) -> None:
    """Rank 3 sends none once rank 1 hangs. No network delays the heartbeats of ranks 0 and 1, which are on one machine,
    so they are late only if these ranks are slow.
    """
    ranks = Ranks(tmp_path, "aabb")
    for rank in late:
        ranks.monitors[rank]._beat_seconds.extend([0.7, 1.7, 4.7 - rank])
    ranks.beat()
    ranks.hang(1, others=[1, 2])
    ranks.watch(0, after=ROUND)
    ending = ranks.ending(0)
    if late == (2, 3):
        assert (ending.at_fault, ending.is_silent) == ((), False)
        text = "heartbeats of host host-b came late, by up to 2.7 s: the network loses packets"
        assert ending.line == f"no single rank: {text}"
    else:
        assert ending.at_fault == (3,)


def test_a_rank_that_is_stopped_is_named_although_its_heartbeats_came_late_before(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "aabb")
    for rank in (2, 3):
        ranks.monitors[rank]._beat_seconds.extend([3.1] * 3)
    ranks.beat()
    ranks.hang(1, others=[1, 2])
    ranks.monitors[0]._heard_at[3] -= 20
    ranks.watch(0, after=ROUND)
    ending = ranks.ending(0)
    assert (ending.at_fault, ending.line) == ((3,), f"{ranks.processes[3]}: {SILENT}")


@pytest.mark.parametrize("late", [(0.6, 2.0), (3.1,), (1.6, 1.6), (0.6, 0.6, 0.6, 0.6)])
def test_a_few_late_heartbeats_are_chance(late: tuple[float, ...], tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "ab")
    ranks.monitors[1]._beat_seconds.extend([2.0, *[0.1] * (60 - len(late)), *late])
    ranks.beat()
    assert ranks.monitors[0]._latest[1].late_seconds == 0


def test_a_pause_of_rank_zero_is_no_silence_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path, "ab")
    zero = ranks.monitors[0]
    ranks.hang(1, others=[])
    assert zero._compare_at < math.inf
    zero._trouble_at = 50.0
    monkeypatch.setattr(zero._pauses, "last_pause", lambda: Pause(100.0, 100.0, is_of_process=True))
    lines: list[str] = []
    zero.log = lines.append
    # All that was heard before the pause is old now.
    zero._heard_at = dict.fromkeys((0, 1), time.monotonic() - 100)
    zero._exclude_pause()
    ranks.watch(0)
    assert zero._stored_ending is None
    assert zero._trouble_at == 150.0
    assert lines == ["watchdog: rank 0 was paused for 100 s and runs again"]


@pytest.mark.parametrize("machines", ["aa", "ab"])
def test_a_rank_zero_that_names_nobody_is_stuck_itself(
    machines: str, left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "kill_process", lambda process, why: killed.append(process.pid))
    killed: list[int] = []
    ranks = Ranks(tmp_path, machines, pids=[os.getppid(), os.getpid()])
    ranks.watch(1, after=101)
    ranks.watch(1, after=2 * ROUND_SECONDS - 1)
    assert ranks.monitors[1]._ending is None
    # A store that has not answered since says nothing of rank zero, which is also not heard over a slow network.
    ranks.monitors[1]._answered_at = time.monotonic()
    ranks.watch(1, after=2 * ROUND_SECONDS + 1, is_answered=False)
    assert ranks.monitors[1]._ending is None
    with pytest.raises(LeftError):
        ranks.watch(1, after=2 * ROUND_SECONDS + 3)
    ending = ranks.monitors[1]._ending
    assert ending is not None
    assert ending.line == f"{ranks.processes[0]} {SILENT}, as seen from host host-{machines[1]}"
    assert (ranks.folder / REPORT).read_text() == f"{ending.line}\n"
    assert killed == ([os.getppid()] if machines == "aa" else [])


def test_a_rank_that_loses_the_store_names_rank_zero(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "ab")
    own = ranks.monitors[1]
    with pytest.raises(LeftError):
        ranks.watch(1, after=OVER, is_answered=False)
    assert own._ending is not None
    assert own._ending.line == f"{ranks.processes[0]} {SILENT}, as seen from host host-b"
    own._ending, own._is_store_lost = None, True
    ranks.watch(1)
    assert own._ending is not None
    assert (
        own._ending.line == f"{ranks.processes[0]}, or the launcher that serves its store, has ended without a message"
    )
    # What was written first of this run remains, and rank zero's word replaces it.
    assert SILENT in (ranks.folder / REPORT).read_text()


def test_a_store_whose_process_ends_is_noticed_at_once(tmp_path: Path) -> None:
    code = (
        "import torch.distributed as dist, sys; s = dist.TCPStore('127.0.0.1', 0, is_master=True, "
        "wait_for_workers=False); s.set('heartbeat/0', '{}'); s.set('ending', 'none'); print(s.port, flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), wait_for_workers=False)
        processes = [RankProcess(rank, "host", 1, "", "") for rank in (0, 1)]
        monitor = Monitor(RankProgress(1, NEVER), processes, store, tmp_path)
        began, beats = monitor._answered_at, threading.Thread(target=monitor._beat)
        beats.start()
        until = time.monotonic() + 60
        while monitor._answered_at == began and time.monotonic() < until:
            time.sleep(0.01)
        assert not monitor._is_store_lost
        server.kill()
    beats.join(60)
    assert monitor._is_store_lost


def test_a_full_disk_behind_standard_error_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(module, "_STDERR", full.fileno())
        # It raises where the error ends the thread.
        module._print("watchdog: rank 1 ends\n")
    with (tmp_path / "log").open("wb", buffering=0) as log:
        monkeypatch.setattr(module, "_STDERR", log.fileno())
        module._print("watchdog: rank 2 ends\n")
    assert (tmp_path / "log").read_text() == "watchdog: rank 2 ends\n"


def test_two_ranks_meet_and_say_goodbye(tmp_path: Path) -> None:
    store, ended = dist.HashStore(), []

    def work(rank: int) -> None:
        with start_monitor(RankProgress(rank, NEVER), World(rank, 2, rank, 2, "test"), store, tmp_path / "run"):
            pass
        ended.append(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ended) == [0, 1]
    assert list(tmp_path.iterdir()) == []

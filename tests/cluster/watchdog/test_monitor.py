"""A rank's thread beside a real coordinator: what it states before it leaves, and what it makes of rank zero's silence."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_finetune.cluster.watchdog import monitor as module
from ds_finetune.cluster.watchdog.connection import CLOSED, UNREACHABLE, UNREACHABLE_SECONDS, Connection
from ds_finetune.cluster.watchdog.coordinator import REPORT, STATUS_SECONDS
from ds_finetune.cluster.watchdog.diagnosis import SILENT
from ds_finetune.cluster.watchdog.kills import FOLDER, record_kill
from ds_finetune.cluster.watchdog.messages import CoordinatorLocation, RankLeaving, RankProcess
from ds_finetune.cluster.watchdog.monitor import Monitor, start_monitor
from ds_finetune.cluster.watchdog.progress import HangLimits, RankProgress
from ds_finetune.errors import RunError
from ds_finetune.system.process_messages import encode
from ds_finetune.system.world import World
from tests.cluster.watchdog.test_connection import connected
from tests.cluster.watchdog.test_coordinator import SECRET, Ranks, until

NEVER = HangLimits(100.0, 100.0, 100.0)


class LeftError(BaseException):
    """Where the process would have ended."""


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which the process would have ended."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise LeftError

    monkeypatch.setattr(os, "_exit", leave)
    return codes


def _monitor(link: Connection, folder: Path) -> Monitor:
    world = World(1, 3, 1, 3, "test")
    return Monitor(RankProgress(1, NEVER), world, link, RankProcess(0, "host-0", 4000, "1", "elsewhere"), folder)


def test_a_rank_that_calls_exit_says_so(left: list[int], tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    monitor = _monitor(ranks.connections[1], tmp_path)
    with pytest.raises(LeftError), monitor.announce_exits():
        os._exit(3)
    assert left == [3]
    line = ranks.end_of(0).line
    assert line.startswith("rank 1 (host host-1, process 4001) called os._exit(3) at ")
    assert "test_monitor.py" in line


def test_a_forked_process_that_calls_exit_says_nothing(
    left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path)
    monitor, pid = _monitor(ranks.connections[1], tmp_path), os.getpid()
    with monitor.announce_exits():
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(LeftError):
            os._exit(0)
    ranks.connections[2].send(RankLeaving("left"))
    assert ranks.end_of(0).at_fault == (2,)


def test_a_rank_that_gives_up_on_rank_zero_says_so(left: list[int], tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    monitor = _monitor(ranks.connections[1], tmp_path)
    with pytest.raises(LeftError):
        monitor._leave(monitor._ending_without_coordinator("does not answer"))
    assert "rank 1 (host host-1, process 4001) left: rank 0" in ranks.end_of(2).line


def test_rank_zero_is_silent_only_once_its_answer_has_arrived_or_the_connection_is_lost(
    left: list[int], tmp_path: Path
) -> None:
    coordinator, rank = connected()
    monitor = _monitor(rank, tmp_path)
    monitor.progress.phase = "start"
    (tmp_path / FOLDER).mkdir()
    hung = time.monotonic() + 101
    monitor._act_on_deadlines(hung)
    monitor._act_on_deadlines(hung + STATUS_SECONDS + UNREACHABLE_SECONDS)
    assert not (tmp_path / FOLDER / REPORT).exists()
    with pytest.raises(LeftError):
        monitor._act_on_deadlines(hung + STATUS_SECONDS + UNREACHABLE_SECONDS + 0.1)
    assert SILENT in (tmp_path / FOLDER / REPORT).read_text()
    coordinator.close()


@pytest.mark.parametrize(("why", "killed"), [(SILENT, ["1"]), (CLOSED, []), (UNREACHABLE, [])])
def test_rank_zero_is_killed_only_where_it_is_silent(why: str, killed: list[str], tmp_path: Path) -> None:
    """A rank zero that has given up this rank closes the connection too, because packets are lost."""
    _, rank = connected()
    monitor = _monitor(rank, tmp_path)
    monitor._pid_namespace = "elsewhere"
    assert list(monitor._ending_without_coordinator(why).killers) == killed


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


def test_the_death_of_a_rank_zero_that_was_ended_on_purpose_is_marked(tmp_path: Path) -> None:
    coordinator, rank = connected()
    monitor = _monitor(rank, tmp_path)
    record_kill(tmp_path / FOLDER, 4000, "1", "rank 0: does not answer")
    coordinator.close()
    until(lambda: rank.receive() == [] and rank.is_lost)
    assert monitor._why_coordinator_lost() == "was ended by the watchdog: rank 0: does not answer"


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


def test_a_rank_that_is_refused_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank one has a secret in its environment, rank zero has none."""
    store, errors = dist.HashStore(), dict[int, str]()

    def work(rank: int) -> None:
        world = World(rank, 2, rank, 2, "test")
        try:
            with start_monitor(RankProgress(rank, NEVER), world, store, tmp_path / "run") as monitor:
                monitor.wait_until_prepared(store)
        except RunError as error:
            errors[rank] = str(error)

    real = module.agree_on_secret

    def with_variable(*args, **given):  # noqa: ANN002, ANN003, ANN202
        return real(*args, **given | {"environ": {"DS_FINETUNE_SECRET": "another"} if args[1].rank else {}})

    monkeypatch.setattr(module, "agree_on_secret", with_variable)
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(errors) == [0, 1]
    assert "rank 1 has not joined the watchdog of rank 0: DS_FINETUNE_SECRET is set for rank 1" in errors[0]
    assert "DS_FINETUNE_SECRET is set for rank 1, and not set for rank 0" in errors[1]


def test_a_rank_with_another_secret_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path)
    store = dist.HashStore()
    store.set("watchdog/secret", json.dumps({"kind": "environment"}))
    location = CoordinatorLocation("127.0.0.1", ranks.port, RankProcess(0, "a", 7, "", ""))
    store.set("watchdog/coordinator", encode(location).decode())
    monkeypatch.setenv("DS_FINETUNE_SECRET", "another")
    told = r"rank 1 is not accepted by the watchdog of rank 0 at 127\.0\.0\.1:\d+: its secret is another"
    with (
        pytest.raises(RunError, match=told) as refused,
        start_monitor(RankProgress(1, NEVER), World(1, 3, 1, 3, "test"), store, tmp_path),
    ):
        pass
    assert "DS_FINETUNE_SECRET" in refused.value.hint
    assert SECRET.decode() not in str(refused.value)

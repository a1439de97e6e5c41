"""How long a rank may go without progress, and what it counts of itself."""

import math
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ds_finetune.config.schema import WatchdogConfig
from ds_finetune.observers.record import StepRecord
from ds_finetune.schedule import seconds_of
from ds_finetune.watchdog.collectives import seen_collectives
from ds_finetune.watchdog.progress import Board, Patience
from ds_finetune.watchdog.stragglers import straggler


def _steps(*seconds: float) -> Iterator[StepRecord]:
    return (StepRecord(number, {"perf/step_seconds": each}) for number, each in enumerate(seconds, start=1))


def _board(**given: str) -> Board:
    return Board(0, Patience.of(WatchdogConfig(**given)))  # type: ignore[arg-type]


def test_the_limit_follows_the_phase() -> None:
    board = _board(start="10 minutes", other="20 minutes")
    assert math.isinf(board.limit())
    with board.during("start"):
        assert board.limit() == 600
    for _ in board.counted(_steps(100, 20, 20, 20, 1)):
        with board.during("save"):
            assert board.limit() == 1200
    assert board.step == 5
    assert board.limit() == 200
    for _ in board.counted(_steps(*[1] * 10)):
        pass
    assert board.limit() == 60


def test_a_limit_may_be_given_or_left_out() -> None:
    fixed, never = _board(limit="90 seconds"), _board(limit="never")
    for board in (fixed, never):
        assert list(board.counted(_steps(100)))
    assert fixed.limit() == 90
    assert math.isinf(never.limit())


def test_collectives_are_progress_where_tensors_go_one_by_one_and_in_no_step() -> None:
    board = _board()
    assert list(board.counted(_steps(1)))
    began = board.silent_since()
    time.sleep(0.01)
    board.leave(board.enter("all_reduce", 1, "all"))
    assert board.silent_since() == began
    with board.during("export"):
        entered = board.silent_since()
        time.sleep(0.01)
        board.leave(board.enter("all_reduce", 1, "all"))
        assert board.silent_since() > entered
    with board.during("save"):
        entered = board.silent_since()
        time.sleep(0.01)
        board.leave(board.enter("all_reduce", 1, "all"))
        assert board.silent_since() == entered


def test_own_time_is_without_that_in_collectives() -> None:
    board = _board()

    def steps() -> Iterator[StepRecord]:
        for number in (1, 2):
            began = board.enter("all_reduce", 1, "all")
            time.sleep(0.05)
            # A synchronous collective waits inside; that is not counted twice.
            board.leave(board.wait())
            board.leave(began)
            yield StepRecord(number, {"perf/step_seconds": 0.08})

    assert list(board.counted(steps()))
    assert list(board.own_seconds) == [pytest.approx(0.03, abs=0.02)]


def test_the_slowest_is_held_against_the_median() -> None:
    assert straggler([1.0, 1.1, 1.8, 1.0]) == (2, 1.8)
    assert straggler([2.0, 1.0]) == (0, 2.0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90 seconds", 90), ("1 second", 1), ("1.5 minutes", 90), ("2 hours", 7200)]
)
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["90", "0 seconds", "-1 minutes", "3 steps", "soon"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time; write `90 seconds`"):
        seconds_of(text)


def test_collectives_are_seen_by_name_size_and_number() -> None:
    board, before = _board(), dist.all_reduce
    if dist.is_initialized():
        # Of another test's single process.
        dist.destroy_process_group()
    with seen_collectives(board):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.zeros(3))
        dist.all_gather([torch.zeros(5)], tensor=torch.zeros(5))
        dist.broadcast(torch.zeros(2), src=0, group=dist.new_group([0]), async_op=True).wait()
        dist.all_gather_object([None], 1)
        dist.barrier(dist.group.WORLD)
        dist.destroy_process_group()
    assert [(call.name, call.size, call.number) for call in board.answer().recent] == [
        ("all_reduce", 3, 1),
        ("all_gather", 5, 2),
        ("broadcast", 2, 3),
        ("all_gather_object", 0, 4),
        ("barrier", 0, 5),
    ]
    assert board.answer().inside is None
    assert dist.all_reduce is before

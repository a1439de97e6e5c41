"""How long a rank may go without progress, and what it counts of itself."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.config.schedule import seconds_of
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.foreign.torch_distributed import spans_of_collectives
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.observers.record import StepRecord
from ds_finetune.trainer.observers import straggler
from ds_finetune.trainer.tracing.kernels import silent_group


def _steps(*seconds: float) -> Iterator[StepRecord]:
    return (StepRecord(number, {"perf/step_seconds": each}) for number, each in enumerate(seconds, start=1))


def _progress(**given: str) -> RankProgress:
    return RankProgress(0, WatchdogConfig(**given))  # type: ignore[arg-type]


def test_a_pause_is_no_time_without_progress() -> None:
    progress = RankProgress(0, WatchdogConfig())
    progress.phase = "step"
    progress._progress_at -= 1000
    progress.exclude_pause(600)
    assert 400 <= time.monotonic() - progress.last_progress_at() < 1000
    # The training thread may have made progress between the pause and this call.
    progress.exclude_pause(600)
    assert progress.last_progress_at() <= time.monotonic()


def test_the_limit_follows_the_phase() -> None:
    progress = _progress(start="10 minutes", other="20 minutes")
    assert math.isinf(progress.limit_seconds())
    with progress.during("start"):
        assert progress.limit_seconds() == 600
    for _ in progress.count_steps(_steps(100, 20, 20, 20, 1)):
        with progress.during("save"):
            assert progress.limit_seconds() == 1200
    assert progress.step == 5
    assert progress.limit_seconds() == 200
    for _ in progress.count_steps(_steps(*[1] * 10)):
        pass
    assert progress.limit_seconds() == 60


def test_a_limit_may_be_given_or_left_out() -> None:
    fixed, never = _progress(limit="90 seconds"), _progress(limit="never")
    for progress in (fixed, never):
        assert list(progress.count_steps(_steps(100)))
    assert fixed.limit_seconds() == 90
    assert math.isinf(never.limit_seconds())


def test_collectives_are_progress_where_tensors_go_one_by_one_and_in_no_step() -> None:
    progress = _progress()
    assert list(progress.count_steps(_steps(1)))
    began = progress.last_progress_at()
    time.sleep(0.01)
    with progress.collectives.record("all_reduce", 1, "all"):
        pass
    assert progress.last_progress_at() == began
    with progress.during("export"):
        entered = progress.last_progress_at()
        time.sleep(0.01)
        with progress.collectives.record("all_reduce", 1, "all"):
            pass
        assert progress.last_progress_at() > entered
    with progress.during("save"):
        entered = progress.last_progress_at()
        time.sleep(0.01)
        with progress.collectives.record("all_reduce", 1, "all"):
            pass
        assert progress.last_progress_at() == entered


def test_own_time_is_without_that_in_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, clock = _progress(), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)

    def steps() -> Iterator[StepRecord]:
        nonlocal clock
        for number in (1, 2):
            # A synchronous collective waits inside; that is not counted twice.
            with progress.collectives.record("all_reduce", 1, "all"), progress.collectives.waiting():
                clock += 5
            yield StepRecord(number, {"perf/step_seconds": 8})

    assert list(progress.count_steps(steps()))
    assert list(progress.own_seconds) == [3]


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
    progress, before = _progress(), dist.ProcessGroup.allreduce
    if dist.is_initialized():
        # Of another test's single process.
        dist.destroy_process_group()
    with progress.collectives.observe():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.zeros(3))
        dist.all_gather([torch.zeros(5)], tensor=torch.zeros(5))
        dist.broadcast(torch.zeros(2), src=0, group=dist.new_group([0]), async_op=True).wait()
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4))
        # A group of a memory trace, which communicates with nobody.
        silent_group(TensorParallelGroup, 2).all_reduce(torch.zeros(7))
        dist.barrier(dist.group.WORLD)
        dist.destroy_process_group()
    assert [(call.name, call.size, call.number) for call in progress.collectives.last_calls] == [
        ("all_reduce", 12, 1),
        ("all_gather", 20, 2),
        ("broadcast", 8, 3),
        # Ranks may have inputs of other sizes.
        ("all_to_all", 0, 4),
        ("barrier", 0, 5),
    ]
    assert progress.status().inside is None
    assert dist.ProcessGroup.allreduce is before


def test_a_wait_runs_in_the_context_of_its_call() -> None:
    """Waits for calls that began outside of the context run in the common one."""
    entered: list[str] = []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    earlier = dist.all_reduce(torch.zeros(3), async_op=True)
    with spans_of_collectives(
        ["allreduce", "broadcast"],
        lambda _, name, args: (partial(span, f"call {name}"), partial(span, f"wait {name}")),
        partial(span, "other wait"),
    ):
        both = [dist.all_reduce(torch.zeros(3), async_op=True), dist.broadcast(torch.zeros(2), src=0, async_op=True)]
        for work in (*reversed(both), earlier):
            work.wait()
    dist.destroy_process_group()
    assert entered == ["call allreduce", "call broadcast", "wait broadcast", "wait allreduce", "other wait"]

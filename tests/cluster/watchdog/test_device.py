"""Asynchronous collectives, with a double of NCCL: a call returns once it is enqueued, and reading a result waits for
the peers.
"""

import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ds_finetune.cluster.watchdog.endings import diagnose
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import REPORT_SECONDS, ParallelConfig, WatchdogConfig
from ds_finetune.engine.groups.process_groups import open_groups
from ds_finetune.errors import ConfigError
from ds_finetune.foreign.torch_distributed import default_timeout
from ds_finetune.observers.record import StepRecord
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.observers import straggler

SECONDS = 60.0
NEVER = WatchdogConfig(limit="100 seconds", start="100 seconds", other="100 seconds")


class Stream(threading.Thread):
    """A device's queue, whose work is done in order."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self._work.get()()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def synchronize(self) -> None:
        """What `tolist` and `item` do."""
        done = threading.Event()
        self.enqueue(done.set)
        assert done.wait(SECONDS)


class StreamEvent:
    """An event in a stream, which holds the time once it is reached."""

    def __init__(self, stream: Stream) -> None:
        self.times: list[float] = []
        stream.enqueue(lambda: self.times.append(time.monotonic()))

    def query(self) -> bool:
        return bool(self.times)

    def elapsed_time(self, end: "StreamEvent") -> float:
        return (end.times[0] - self.times[0]) * 1000


class Rank:
    """A rank's progress, device and share of the collectives."""

    def __init__(self, number: int, peers: threading.Barrier) -> None:
        self.stream, self.peers = Stream(), peers
        self.progress = RankProgress(number, NEVER)
        self.progress.collectives._event = lambda: StreamEvent(self.stream)  # type: ignore[method-assign]

    def all_reduce(self) -> None:
        with self.progress.collectives.record("all_reduce", 2, "all"):
            self.stream.enqueue(lambda: self.peers.wait(SECONDS))

    def steps(self, count: int, seconds: float) -> Iterator[StepRecord]:
        for number in range(1, count + 1):
            began = time.monotonic()
            self.stream.enqueue(lambda: time.sleep(seconds))
            self.all_reduce()
            self.stream.synchronize()
            yield StepRecord(number, {"perf/step_seconds": time.monotonic() - began})


def _on_threads(*work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)


def test_a_slow_device_is_found_although_collectives_return_at_once() -> None:
    peers = threading.Barrier(2)
    ranks = [Rank(number, peers) for number in (0, 1)]
    _on_threads(
        *(
            lambda rank=rank, seconds=seconds: list(rank.progress.count_steps(rank.steps(5, seconds)))
            for rank, seconds in zip(ranks, (0.01, 0.3), strict=True)
        )
    )
    fast, slow = (statistics.median(rank.progress.own_seconds) for rank in ranks)
    # Both take as long for a step; what the fast one waits is not its own.
    assert slow > 0.25
    number, ratio = straggler([fast, slow])
    assert number == 1
    assert ratio > 2


def test_a_hung_kernel_names_its_rank() -> None:
    peers, released = threading.Barrier(2), threading.Event()
    ranks = [Rank(number, peers) for number in (0, 1)]
    for rank in ranks:
        rank.all_reduce()
    _on_threads(*(rank.stream.synchronize for rank in ranks))
    ranks[1].stream.enqueue(lambda: released.wait(SECONDS))
    for rank in ranks:
        # The program goes on to ask for both, on each rank.
        rank.all_reduce()
        rank.all_reduce()
    until = time.monotonic() + SECONDS
    while ranks[0].progress.status().inside is None and time.monotonic() < until:
        time.sleep(0.01)
    answers = {number: rank.progress.status() for number, rank in enumerate(ranks)}
    found = diagnose(answers)
    released.set()
    assert found == ((1,), "has entered 1 collectives of all, others 2")
    assert str(answers[0]).startswith("waits in all_reduce of 2 bytes (number 2 of all)")
    assert str(answers[1]).startswith("has not reached all_reduce of 2 bytes (number 2 of all) on its device")


def test_a_device_that_has_failed_does_not_end_the_watchdog() -> None:
    """After an illegal access every question to CUDA raises; the thread that would end the run asks on."""

    class FailedEvent(StreamEvent):
        def query(self) -> bool:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    progress, stream = RankProgress(0, NEVER), Stream()
    progress.collectives._event = lambda: FailedEvent(stream)  # type: ignore[method-assign]
    with progress.collectives.record("all_reduce", 2, "all"):
        status = progress.status()
    assert status.inside is not None
    assert (status.inside.name, status.queued) == ("all_reduce", None)


def test_what_a_device_is_done_with_is_forgotten() -> None:
    rank = Rank(0, threading.Barrier(1))
    for _ in range(200):
        rank.all_reduce()
        rank.stream.synchronize()
    rank.progress.collectives.take_waited()
    assert not rank.progress.collectives._pending
    assert rank.progress.status().counts == {"all": 200}


@pytest.fixture
def one_process() -> Iterator[None]:
    if dist.is_initialized():
        # Of another test's single process.
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _timeout(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_a_timeout_holds_for_groups_whose_makers_pass_none(one_process: None) -> None:
    from deepspeed.comm.torch import TorchBackend

    wanted = timedelta(minutes=35)
    with default_timeout(wanted):
        plain = dist.new_group([0])
        of_deepspeed = TorchBackend.new_group(None, [0])  # type: ignore[arg-type]
        (mesh,) = dist.device_mesh.init_device_mesh("cpu", (1,)).get_all_groups()
        with open_groups(Mesh.of(ParallelConfig(), world_size=1, rank=0), timeout=wanted):
            pass
    assert {_timeout(group) for group in (plain, of_deepspeed)} == {wanted}
    assert mesh is not None
    assert _timeout(dist.new_group([0])) != wanted


def test_the_watchdog_reports_before_torch_aborts() -> None:
    defaults = WatchdogConfig()
    assert defaults.collective_seconds >= defaults.longest_limit + REPORT_SECONDS
    long = WatchdogConfig(limit="2 hours")
    assert long.collective_seconds >= 7200 + REPORT_SECONDS
    # A limit that follows from slow steps is cut off.
    progress = RankProgress(0, defaults)
    assert list(progress.count_steps(iter([StepRecord(1, {"perf/step_seconds": 600.0})])))
    assert progress.limit_seconds() == defaults.collective_seconds - REPORT_SECONDS


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({"collective": "30 minutes"}, True),
        ({"collective": "31 minutes"}, False),
        ({"collective": "31 minutes", "limit": "31 minutes"}, True),
        ({"collective": "4 seconds", "limit": "never"}, False),
    ],
)
def test_a_watchdog_that_would_come_too_late_is_refused(given: dict[str, str], is_refused: bool) -> None:
    tree = {"model": {"path": "m"}, "data": {"train": "d"}, "output_dir": "o", "watchdog": given}
    config, world = RunConfig.model_validate(tree), World(0, 1, 0, 1, "test")
    if not is_refused:
        make_plan(RunSettings.of(config), world=world, device="cpu")
        return
    with pytest.raises(ConfigError, match="torch would abort a collective before the watchdog reports") as refused:
        make_plan(RunSettings.of(config), world=world, device="cpu")
    assert "leave watchdog.collective out" in refused.value.hint

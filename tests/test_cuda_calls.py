"""Calls of CUDA that no other test executes, with doubles that keep CUDA's rules: events are reached in order and have
times only then, a rank sets its device before NCCL, and the generator of a GPU has a state of its own.
"""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from ds_finetune.checkpoint.restore import random_state, restore_random_state
from ds_finetune.cluster.doctor import measure
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.engine import generation
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World


class Queue:
    """A device whose queued events are reached when the test says so, at a time in milliseconds."""

    def __init__(self) -> None:
        self.recorded: list[Event] = []

    def reach(self, *times: float) -> None:
        for event, time in zip([each for each in self.recorded if each.time is None], times, strict=False):
            event.time = time


class Event:
    """`torch.cuda.Event`."""

    queue: Queue

    def __init__(self, enable_timing: bool = False) -> None:
        self.has_time, self.time = enable_timing, None

    def record(self, stream: object = None) -> None:
        self.queue.recorded.append(self)

    def query(self) -> bool:
        return self.time is not None

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.has_time
        assert end_event.has_time
        assert self.time is not None
        assert end_event.time is not None
        return end_event.time - self.time


def test_the_watchdog_reads_progress_from_events(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, streams = Queue(), ["default"]
    monkeypatch.setattr(Event, "queue", queue, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    progress = RankProgress(0, WatchdogConfig())
    progress.collectives.device = "cuda:0"
    for name, stream in (("all_reduce", "default"), ("all_gather", "of overlap_comm")):
        streams.append(stream)
        with progress.collectives.record(name, 2, "all"):
            pass

    def position() -> tuple[str, str]:
        status = progress.status()
        return status.inside.name if status.inside else "", status.queued.name if status.queued else ""

    assert position() == ("", "all_reduce")
    queue.reach(100.0)
    assert position() == ("all_reduce", "all_gather")
    queue.reach(2600.0, 2700.0)
    assert position() == ("all_gather", "")
    queue.reach(9000.0)
    assert position() == ("", "")
    # Only the stream that computes has waited.
    assert progress.collectives.take_waited() == pytest.approx(2.5)


def test_the_random_state_of_a_gpu_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", generator.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", generator.set_state)
    saved = json.loads(json.dumps(random_state()))
    wanted = torch.rand(5, generator=generator), torch.rand(5)
    restore_random_state(saved)
    found = torch.rand(5, generator=generator), torch.rand(5)
    assert all(map(torch.equal, found, wanted))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert random_state()["cuda"] is None


def test_free_memory_of_a_gpu_counts_what_torch_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("mem_get_info", (10, 80)), ("memory_reserved", 50), ("memory_allocated", 35)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(generation, "all_gather_scalar", lambda mine: [mine, 30.0])
    tree = {"model": "none", "data": {"train": "none"}, "output_dir": "out"}
    plan = make_plan(RunSettings.of(RunConfig.model_validate(tree)), world=World(0, 1, 0, 1, "a test"), device="cuda")
    assert generation.least_free_bytes(plan) == 10 + 50 - 35


class _OnCpu(TorchFunctionMode):
    """Tensors of the device `cuda:N` are made on the CPU, once the process has set that device."""

    device: torch.device | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            assert self.device == torch.device(kwargs["device"])
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    yield number
    if dist.is_initialized():
        dist.destroy_process_group()


def test_doctor_measures_gpus_by_nccl(
    monkeypatch: pytest.MonkeyPatch, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    mode, start, asked, waits = _OnCpu(), dist.init_process_group, [], []

    def on_gloo(backend: str, **given: Any) -> None:
        assert mode.device == torch.device("cuda", 2), "NCCL takes the device that is set"
        asked.append(backend)
        start("gloo", **given)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(mode, "device", device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(dist, "init_process_group", on_gloo)
    for name, value in {"_SIZES": {"cuda": 256}, "die_with_parent": lambda: None}.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(measure, "device_of_rank", lambda device, local_rank: f"{device}:{local_rank}")
    rank = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name, number in {**rank, **dict.fromkeys(names, "lo"), "TORCH_NCCL_BLOCKING_WAIT": 1}.items():
        monkeypatch.setenv(name, str(number))
    with mode:
        measure.main("a", "5,2")
    assert asked == ["nccl"]
    # The clock stops after the device.
    assert len(waits) >= 4
    found = json.loads(capsys.readouterr().out)
    assert found == {"inside": 0.0, "all": 0.0, "ranks": 1, "bytes": 256}

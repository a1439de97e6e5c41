"""A thread chooses the GPU of its rank before it touches CUDA, which would make a context on GPU 0 otherwise."""

import ast
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.data.batches import BatchPlan, training_batches
from ds_finetune.engine.engine import Engine
from ds_finetune.reference.selftest.cells import rows
from ds_finetune.trainer import batches as trainer_batches
from ds_finetune.trainer.loop import BEGINNING
from tests.conftest import ROOT

WITHOUT_CUDA = {
    "cli/launch.py": "lines of ranks",
    "checkpoint/tools.py": "digests of files",
    "cluster/host_program.py": "requests",
    "cluster/hosts.py": "lines of other hosts' processes",
    "cluster/launch/run.py": "processes of other hosts",
    "export/convert.py": "tensors of files, on the CPU",
    "export/verify/verify.py": "digests of files",
    "foreign/hub_access.py": "a request",
    "objectives/rewards/pool.py": "processes of rewards",
    "observers/stopping.py": "signals",
    "observers/trackers.py": "requests",
    "runs/status.py": "files",
    "trainer/rollouts/vllm_server.py": "requests to the server",
    "trainer/run_records.py": "a file",
}
"""Files that start threads, and what these do."""
ON_A_DEVICE = {
    "cluster/watchdog/monitor.py": "queries events of the device",
    "data/batches.py": "pins batches",
    # The model of a single process is on the current GPU, 0.
    "serving/in_process.py": "generates",
}


class Cuda:
    """Calls of CUDA by the name of their thread, in order; this machine has none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, list[str]] = {}
        recorded = self._recorded
        monkeypatch.setattr(torch.cuda, "set_device", recorded(lambda device: f"set_device {device}"))
        monkeypatch.setattr(torch.Tensor, "pin_memory", recorded(lambda tensor: "pin", lambda tensor: tensor))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self._event())
        monkeypatch.setattr(torch.cuda, "current_stream", recorded(lambda: "stream"))
        monkeypatch.setattr(torch.cuda, "default_stream", recorded(lambda: "stream"))

    def _recorded(self, name: Any, result: Any = lambda *_: None) -> Any:
        def call(*args: Any) -> Any:
            self.calls.setdefault(threading.current_thread().name, []).append(name(*args))
            return result(*args)

        return call

    def _event(self) -> SimpleNamespace:
        return SimpleNamespace(
            record=self._recorded(lambda: "record"),
            query=self._recorded(lambda: "query", lambda: False),
            elapsed_time=self._recorded(lambda other: "elapsed", lambda other: 0.0),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_the_thread_that_pins_batches(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = BatchPlan(
        global_batch_size=2, micro_batch_size=1, rank=0, dp=1, seed=0, shuffle=False, pad_token_id=0, row_len=None
    )

    def run_batches(*_: object, **__: object) -> Iterator[Any]:
        return training_batches(rows(packing=False), plan, start_step=0, total_rows=4)

    monkeypatch.setattr(trainer_batches, "run_batches", run_batches)
    engine: Any = object.__new__(Engine)
    engine._device, engine._ds = torch.device("cuda", 3), SimpleNamespace(module=SimpleNamespace(sp_group=None))
    ahead = trainer_batches.batches_ahead(
        SimpleNamespace(),  # type: ignore[arg-type]
        engine,
        after=BEGINNING,
        stream_position=None,  # type: ignore[arg-type]
    )
    with ahead as found:
        assert len(list(found)) == 2
    calls = cuda.calls["prefetch"]
    assert calls[0] == "set_device cuda:3"
    assert "pin" in calls


def test_the_thread_of_the_watchdog(cuda: Cuda) -> None:
    progress = RankProgress(0, WatchdogConfig())
    progress.collectives.device = "cuda:3"
    with progress.collectives.record("all_reduce", 1, "all"):
        pass
    thread = threading.Thread(target=progress.status, name="watchdog")
    thread.start()
    thread.join()
    assert cuda.calls["watchdog"][0] == "set_device cuda:3"
    assert "query" in cuda.calls["watchdog"]


def test_every_thread_of_the_package_is_known() -> None:
    """A new thread either calls `use_device` first, or touches no CUDA."""
    found = set()
    for path in (ROOT / "ds_finetune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = list(node.bases) if isinstance(node, ast.ClassDef) else []
            names += [node.func] if isinstance(node, ast.Call) else []
            if any(ast.unparse(name).rpartition(".")[2] in ("Thread", "Timer", "ThreadPoolExecutor") for name in names):
                found.add(str(path.relative_to(ROOT / "ds_finetune")))
    assert found == WITHOUT_CUDA.keys() | ON_A_DEVICE.keys()

"""A process group is gone when it is closed: its threads may not outlive Python."""

import json
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_finetune.engine.groups.default_group import meet, process_group
from ds_finetune.engine.patches.deepspeed_engine import destroyed_at_end
from ds_finetune.engine.patches.deepspeed_init import forget_groups
from ds_finetune.errors import RunError
from ds_finetune.system.world import World
from tests.running import start

PROGRAM = """
import os
from pathlib import Path

from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.system.world import World


def threads():
    return sorted(name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm"))


with process_group(World.from_environment(os.environ), "cpu"):
    from deepspeed.utils import groups

    groups._clone_world_group()
    assert all_gather_object(1) == [1]
    print("open", threads())
print("closed", threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are read from /proc")
def test_no_thread_of_a_group_outlives_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = start([sys.executable, str(program)], {"DS_ACCELERATOR": "cpu"}, fork=False)
    assert done.returncode == 0, done.stderr
    opened, closed = (line for line in done.stdout.splitlines() if line.startswith(("open", "closed")))
    assert "gloo" in opened
    assert "gloo" not in closed


def test_a_port_in_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RunError, match=f"cannot connect to port {port} of this host, which is in use"):
            meet(World.from_environment(os.environ))


@pytest.mark.parametrize(("rank", "absent"), [(0, "ranks 1 have not connected"), (1, "rank 0 does not answer: ")])
def test_an_absent_rank_is_named_and_the_wait_can_be_interrupted(rank: int, absent: str) -> None:
    program = "import os; from ds_finetune.engine.groups import default_group as group; group.REPORT_AFTER = 0.5\n"
    program += "from ds_finetune.system.world import World; group.meet(World.from_environment(os.environ))"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    environ = os.environ | ranks | {"MASTER_PORT": port}
    waiting = subprocess.Popen([sys.executable, "-c", program], env=environ, stderr=subprocess.PIPE, text=True)
    try:
        assert waiting.stderr
        lines = iter(waiting.stderr.readline, "")
        assert absent in next(line for line in lines if line.startswith(f"rank {rank} waits for the other ranks"))
        waiting.send_signal(signal.SIGINT)
        # Without slices it would wait for half an hour.
        assert waiting.wait(timeout=300) != 0
        assert "KeyboardInterrupt" in waiting.stderr.read()
    finally:
        waiting.kill()


def test_a_rank_that_fails_under_nccl_waits_for_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's groups are destroyed when the collectives that were started have ended, and the other rank is gone."""
    start_group, store, ended = dist.init_process_group, dist.HashStore(), []
    store.set("device/1", json.dumps({"device": "cpu", "gpu": "", "host": "b"}))

    def start_fake(_: str, **given: Any) -> None:
        start_group("fake", store=FakeStore(), rank=0, world_size=2, timeout=given["timeout"])

    def destroy() -> None:
        pytest.fail("destroy_process_group waits for the rank that is gone")

    def abort() -> None:
        ended.append("aborted")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(dist, "init_process_group", start_fake)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    with monkeypatch.context() as fake:
        fake.setattr(dist, "destroy_process_group", destroy)
        fake.setattr(dist.distributed_c10d, "_abort_process_group", abort)
        with (
            pytest.raises(torch.OutOfMemoryError),
            process_group(World(0, 2, 0, 1, "t"), "cpu", store, timeout=timedelta(seconds=30)),
        ):
            raise torch.OutOfMemoryError("no memory")
    assert ended == ["aborted"]
    dist.destroy_process_group()
    forget_groups()


@pytest.mark.parametrize(("ranks", "is_destroyed"), [(1, True), (2, False)])
def test_an_engine_is_not_destroyed_after_an_error_beside_other_ranks(ranks: int, is_destroyed: bool) -> None:
    """It waits for the GPU, which may be in a collective with the ranks that are gone."""
    destroyed: list[str] = []
    engine = SimpleNamespace(destroy=lambda: destroyed.append("destroyed"))
    with pytest.raises(torch.OutOfMemoryError), destroyed_at_end(engine, World(0, ranks, 0, ranks, "t")):
        raise torch.OutOfMemoryError("no memory")
    assert bool(destroyed) == is_destroyed
    with destroyed_at_end(engine, World(0, ranks, 0, ranks, "t")):
        destroyed.clear()
    assert destroyed == ["destroyed"]

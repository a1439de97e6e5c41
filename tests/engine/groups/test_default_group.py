"""A process group is gone when it is closed: its threads may not outlive Python."""

import os
import socket
import sys
from pathlib import Path

import pytest

from ds_finetune.engine.groups.default_group import meet
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
        with pytest.raises(RunError, match=f"port {port} of this host is in use"):
            meet(World.from_environment(os.environ))

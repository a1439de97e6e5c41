"""Requests to many hosts at once: an interrupt during a long reply ends the asking side and all processes on the hosts."""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_finetune.cluster.doctor.messages import FreePortReply, FreePortRequest
from ds_finetune.cluster.doctor.session import Cluster
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.errors import LaunchError
from tests.conftest import ROOT

WAITING = """
from ds_finetune.cluster.doctor.session import Cluster
from ds_finetune.cluster.doctor.messages import ChildReplies, FreePortReply, FreePortRequest, RunInChildren
from ds_finetune.cluster.doctor.messages import NetworkRank
from ds_finetune.config.hostfile import Host
from ds_finetune.cluster.launch.remote import Remote

with Cluster([Host("localhost", 1, 1)], Remote(directory="."), print) as cluster:
    port = cluster.ask({"localhost": FreePortRequest()}, FreePortReply, seconds=30)["localhost"].port
    place = NetworkRank(0, 2, "127.0.0.1", port, "cpu", 0, (0, 1))
    print("asked", flush=True)
    cluster.ask({"localhost": RunInChildren([place], 100.0)}, ChildReplies, seconds=100)
"""


def _marked(mark: str) -> list[int]:
    """Processes that have `mark` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found += [int(folder.name)] if mark.encode() in (folder / "environ").read_bytes() else []
        except OSError:
            continue
    return found


def test_an_interrupt_leaves_nothing() -> None:
    mark = secrets.token_hex(8)
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}/{mark}"}
    started = subprocess.Popen(
        [sys.executable, "-c", WAITING], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert started.stdout
    assert started.stdout.readline() == "asked\n"
    until = time.monotonic() + 120
    while len(_marked(mark)) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(_marked(mark)) == 3
    started.send_signal(signal.SIGINT)
    assert started.wait(60) != 0
    started.stdout.close()
    while _marked(mark) and time.monotonic() < until + 60:
        time.sleep(0.05)
    assert not _marked(mark)


def test_a_host_that_cannot_be_asked_is_reported_once_and_asked_no_more() -> None:
    with Cluster([Host("localhost", 1, 1), Host("127.0.0.1", 1, 2)], Remote(directory=str(ROOT)), print) as cluster:
        requests = {"localhost": FreePortRequest(), "127.0.0.1": FreePortRequest()}
        cluster.sessions["localhost"].process.kill()
        assert list(cluster.ask(requests, FreePortReply, seconds=30)) == ["127.0.0.1"]
        assert list(cluster.ask(requests, FreePortReply, seconds=30)) == ["127.0.0.1"]
        clock = cluster.clocks()["127.0.0.1"]
        assert [(check.host, check.state) for check in cluster.lost] == [("localhost", "fail")]
    assert abs(clock.ahead) <= clock.round_trip < 60


def test_no_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(LaunchError, match="`ssh` is not installed here"),
        Cluster([Host("elsewhere", 1, 1, user="me")], Remote(), print),
    ):
        pass

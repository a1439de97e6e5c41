"""The program on each host: what it answers, and that nothing of it is left when the doctor or the connection ends."""

import hashlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from ds_finetune.cluster.doctor.checks import network_checks
from ds_finetune.cluster.doctor.run import DoctorRequest, examine
from ds_finetune.cluster.hosts import Cluster
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.errors import LaunchError
from ds_finetune.system.info import source_version
from tests.conftest import ROOT

WAITING = """
import sys
from contextlib import closing
from ds_finetune.cluster.doctor.checks import network_checks
from ds_finetune.cluster.hosts import Cluster
from ds_finetune.config.hostfile import Host
from ds_finetune.cluster.launch.remote import Remote

with closing(Cluster([Host("localhost", 1, 1)], Remote(directory="."), name="doctor")) as cluster:
    agent = ["torch.distributed.run", "--nproc-per-node=1", "--master-port=0", "-m", "timeit", "-n1", "-r1"]
    agent.append("__import__('pathlib').Path(sys.argv[1] + '/started').touch(); __import__('time').sleep(1000)")
    agent[-1] = agent[-1].replace("sys.argv[1]", repr(sys.argv[1]))
    cluster.ask({"localhost": {"create_marker": {"folders": [sys.argv[1]], "marker": "marker"}}}, seconds=100)
    cluster.ask({"localhost": {"run": {"module": agent, "seconds": 1000}}}, seconds=1000)
"""
HERE = Host("localhost", 1, 1)


def _cluster(hosts: list[Host], remote: Remote) -> "closing[Cluster]":
    return closing(Cluster(hosts, remote, name="doctor"))


@pytest.fixture
def port() -> int:
    """A port that is free."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def marked(mark: str) -> list[int]:
    """Processes that have `mark` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found += [int(folder.name)] if mark.encode() in (folder / "environ").read_bytes() else []
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_nothing_is_left_when_the_doctor_ends(number: int, tmp_path: Path) -> None:
    """Not the agent, not its rank, which is in a session of its own, and no file."""
    mark = secrets.token_hex(8)
    files = tmp_path / "files"
    files.mkdir()
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}/{mark}", "TMPDIR": str(files)}
    quiet = subprocess.DEVNULL
    started = subprocess.Popen([sys.executable, "-c", WAITING, str(tmp_path)], env=environ, stdout=quiet, stderr=quiet)
    until = time.monotonic() + 240
    while not (tmp_path / "started").exists():
        assert started.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    assert (tmp_path / "marker").exists()
    assert list(files.rglob("torchelastic_*")), "the agent's own files"
    assert len(marked(mark)) >= 4, "doctor, program of the host, agent, rank"
    started.send_signal(number)
    assert started.wait(120) != 0
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert not marked(mark)
    assert not (tmp_path / "marker").exists()
    assert not list(files.iterdir())


def test_a_host_that_fails_is_reported_once_and_asked_no_more() -> None:
    look = {"find_marker": {"folders": ["."], "marker": "absent"}}
    with _cluster([HERE, Host("127.0.0.1", 1, 2)], Remote(directory=str(ROOT))) as cluster:
        replies = cluster.ask({"localhost": {"absent": {}}, "127.0.0.1": look}, seconds=100)
        assert list(replies) == ["127.0.0.1"]
        assert list(cluster.ask({"localhost": look, "127.0.0.1": look}, seconds=100)) == ["127.0.0.1"]
        results, ahead, error = replies["127.0.0.1"]
        assert results == {"find_marker": {".": [True, False]}}
        assert abs(ahead) <= error < 100
        (check,) = cluster.lost.values()
    assert (check.name, check.host, check.found) == (
        "python",
        "localhost",
        "Python ended with exit code 1: KeyError: 'absent'",
    )


def test_silence_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the silent program has started ends with it."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}/{mark}")
    with _cluster([HERE], Remote(directory=str(ROOT))) as cluster:
        assert cluster.ask({"localhost": {"find_marker": {"folders": [], "marker": ""}}}, seconds=100)
        sleep = {"module": ["timeit", "-n1", "-r1", "__import__('time').sleep(1000)"], "seconds": 1000}
        assert not cluster.ask({"localhost": {"run": sleep}}, seconds=0.5)
        assert cluster.lost["localhost"].found.startswith("no answer in time")
    assert not marked(mark)


def test_a_program_that_does_not_end_is_killed_after_its_time() -> None:
    with _cluster([HERE], Remote(directory=str(ROOT))) as cluster:
        sleep = {"module": ["timeit", "-n1", "-r1", "__import__('time').sleep(1000)"], "seconds": 0.5}
        assert cluster.ask({"localhost": {"run": sleep}}, seconds=100)["localhost"][0] == {"run": [None, ""]}


def test_what_the_agents_of_hosts_print_that_do_not_meet(port: int) -> None:
    """One that cannot reach the first host, and the first host, which waits in vain."""
    with _cluster([HERE, Host("127.0.0.1", 1, 2)], Remote(directory=str(ROOT))) as cluster:
        queries = {}
        for name, settings in (("localhost", (0, 1)), ("127.0.0.1", (1, port))):
            agent = ["torch.distributed.run", "--nnodes=2", "--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-id=x"]
            agent.append("--rdzv-conf=is_host={},join_timeout=1,read_timeout=1".format(*settings))
            agent += ["--rdzv-endpoint=127.0.0.1:{1}".format(*settings), "-m", "timeit", "1"]
            queries[name] = {"run": {"module": agent, "seconds": 200}}
        ended = {name: results["run"] for name, (results, _, _) in cluster.ask(queries, seconds=250).items()}
    assert [check.found for name in ended for check in network_checks({name: ended[name]}, "10.0.0.1:29500")] == [
        "cannot reach the first host at 10.0.0.1:29500",
        "waited in vain for the other hosts at 10.0.0.1:29500",
    ]


def _shell(folder: Path, text: str) -> Remote:
    """Reaches this machine through a program in place of Python."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return Remote(python=str(program), directory=str(ROOT))


def test_what_a_login_shell_prints_is_no_answer(tmp_path: Path) -> None:
    printed = """echo 'Welcome to gpu-1!'; echo '{"value": 3}'; echo 5; echo null; printf 'without an end'"""
    with _cluster([HERE], _shell(tmp_path, f'{printed}; exec {sys.executable} "$@"')) as cluster:
        replies = cluster.ask({"localhost": {"find_marker": {"folders": [], "marker": ""}}}, seconds=100)
        assert replies["localhost"][0] == {"find_marker": {}}


def test_another_version_of_the_program_is_named(tmp_path: Path) -> None:
    """It answers without what this version needs to know."""
    answer = """read request; eval "token=\\${$#}"; echo "$token"' ["reply", [0, {"facts": {"cores": 1}}]]'; read end"""
    remote = _shell(tmp_path, f"""[ "$2" = -c ] && exec {sys.executable} "$@"; {answer}""")
    (check,) = examine(DoctorRequest((HERE,), remote, 29_738, {"working folder": "."}), print)
    assert (check.name, check.host) == ("versions", "localhost")
    assert check.found == f"it has ds_finetune {source_version()}, and this machine ds_finetune {source_version()}"


def test_an_older_source_is_named_with_both_versions(tmp_path: Path) -> None:
    """It lacks the module of the hosts' program, as one of the first versions does."""
    package = tmp_path / "older" / "ds_finetune"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.0.9"\n')
    digest = hashlib.sha256(b'__version__ = "0.0.9"\n').hexdigest()[:10]
    remote = _shell(tmp_path, f"""PYTHONPATH={package.parent} exec {sys.executable} -S "$@" """)
    (check,) = examine(DoctorRequest((HERE,), remote, 29_738, {"working folder": "."}), print)
    assert (check.name, check.host, check.state) == ("versions", "localhost", "fail")
    assert check.found == f"it has ds_finetune 0.0.9 (source {digest}), and this machine ds_finetune {source_version()}"
    assert check.hint == "install the same source on every host"


def test_a_host_without_the_program_is_named(tmp_path: Path) -> None:
    remote = _shell(tmp_path, f"""PYTHONPATH= exec {sys.executable} -S "$@" """)
    (check,) = examine(DoctorRequest((HERE,), remote, 29_738, {"working folder": "."}), print)
    assert (check.name, check.host) == ("versions", "localhost")
    assert check.found == f"it has no ds_finetune, and this machine ds_finetune {source_version()}"


def test_no_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="`ssh` is not installed on this machine"):
        Cluster([Host("elsewhere", 1, 1, user="me")], Remote(), name="doctor")

"""The doctor on three hosts: ready ones, and each thing that can be wrong with one, named with its host."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.bed import INTERFACE, NETWORK, Bed
from tests.conftest import ROOT
from tests.running import tiny_task

SECONDS = 400
_SHAPE = ("root", "tbf", "rate", "40mbit", "burst", "64kb", "latency", "400ms")
_PORT = 29_777
Found = list[dict[str, Any]]


def _doctor(bed: Bed, *arguments: str, environ: Mapping[str, str] | None = None) -> tuple[int, Found]:
    """Exit code and checks of the doctor, started on the first host."""
    given = {
        "DS_FINETUNE_SSH_ARGS": f"-F {bed.ssh_config}",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "ds_finetune", "doctor", "--json", *arguments]
    done = bed.run(1, command, given | {"GLOO_SOCKET_IFNAME": INTERFACE} | dict(environ or {}), timeout=SECONDS)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _started(bed: Bed) -> "subprocess.Popen[str]":
    """The doctor, started on the first of three hosts."""
    given = {"DS_FINETUNE_SSH_ARGS": f"-F {bed.ssh_config}", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = ["env", "-C", str(bed.shared), sys.executable, "-m", "ds_finetune", "doctor", "--json", "--hostfile"]
    command.append(str(bed.hostfile(1, 1, 1)))
    environ = os.environ | given | {"GLOO_SOCKET_IFNAME": INTERFACE}
    return subprocess.Popen(bed.command(1, command), env=environ, stdout=subprocess.PIPE, text=True)


def _wrong(found: Found) -> dict[tuple[str, str], str]:
    return {(check["host"], check["name"]): check["found"] for check in found if check["state"] == "fail"}


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _programs(bed: Bed, number: int, name: bytes) -> list[int]:
    """Processes of a host with `name` in their command line."""
    return [pid for pid in bed.hosts[number - 1].pids() if name in _command_line(pid)]


def _left(bed: Bed) -> list[int]:
    """Programs of the doctor that still run on any host."""
    return [pid for number in (1, 2, 3) for pid in _programs(bed, number, b"doctor")]


@contextlib.contextmanager
def _slow(bed: Bed, number: int) -> Iterator[None]:
    """What a host sends is held to 40 Mbit a second, a fiftieth of what the bed's links carry on a busy machine."""
    shaped = bed.run(number, ["tc", "qdisc", "add", "dev", INTERFACE, *_SHAPE], timeout=10)
    if shaped.returncode:
        pytest.skip(f"this kernel holds no interface back: {shaped.stderr.strip()}")
    try:
        yield
    finally:
        bed.run(number, ["tc", "qdisc", "del", "dev", INTERFACE, "root"], timeout=10)


def test_ready_hosts(bed: Bed) -> None:
    run_file = tiny_task(bed.shared / "task", train={"global_batch_size": 16})
    code, found = _doctor(bed, str(run_file), "--hostfile", str(bed.hostfile(2, 1, 1)))
    assert (code, _wrong(found)) == (0, {})
    by_name = {check["name"] for check in found if check["state"] == "ok"}
    assert {"ssh", "clock", "versions", "devices", "port", "links", "all-reduce", "folders"} <= by_name
    assert {"plan", "files", "disk", "memory"} <= by_name
    assert len([check for check in found if check["name"] == "ssh"]) == 3
    (rate,) = [check["found"] for check in found if check["name"] == "links" and check["state"] == "ok"]
    assert re.fullmatch(r"[\d.]+ GB/s inside the host", rate)
    (everywhere,) = (check["values"] for check in found if check["name"] == "all-reduce")
    assert (everywhere["ranks"], everywhere["hosts"]) == (4, 3)
    assert not _left(bed)
    assert not list(bed.folder.rglob(".ds_finetune-doctor-*"))


@contextlib.contextmanager
def _in_place_of(bed: Bed, number: int, path: Path, source: Path) -> Iterator[None]:
    """A host sees `source` at `path`."""
    assert bed.run(number, ["mount", "--bind", str(source), str(path)], timeout=10).returncode == 0
    try:
        yield
    finally:
        assert bed.run(number, ["umount", str(path)], timeout=10).returncode == 0


def test_a_host_without_the_program_and_one_with_other_source(bed: Bed) -> None:
    package = ROOT / "ds_finetune"
    absent, other = bed.folder / "absent", bed.folder / "other"
    absent.mkdir()
    # Not an empty folder: an editable installation of another copy would complete it.
    (absent / "__init__.py").write_text("""raise ModuleNotFoundError("No module named 'ds_finetune'")\n""")
    shutil.copytree(package, other, ignore=shutil.ignore_patterns("__pycache__"))
    (other / "errors.py").write_text((other / "errors.py").read_text() + "# changed\n")
    with _in_place_of(bed, 2, package, absent), _in_place_of(bed, 3, package, other):
        code, found = _doctor(bed, "--hostfile", str(bed.hostfile(1, 1, 1)))
    wrong = _wrong(found)
    assert code == 2
    assert wrong.keys() == {(f"{NETWORK}.2", "versions"), (f"{NETWORK}.3", "versions")}
    assert wrong[f"{NETWORK}.2", "versions"].startswith(
        "it has no ds_finetune, and this machine ds_finetune 0.1.0 (source "
    )
    assert wrong[f"{NETWORK}.3", "versions"].startswith("ds_finetune 0.1.0 (source ")
    assert not _left(bed)


def test_nothing_is_left_when_the_connection_is_cut(bed: Bed) -> None:
    """While the agents of two hosts wait for that of the third, ssh to one is killed and then the doctor itself."""
    running = _started(bed)
    until = time.monotonic() + SECONDS
    try:
        while not _programs(bed, 2, b"torch.distributed.run"):
            assert running.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        assert list(bed.shared.glob(".ds_finetune-doctor-*"))
        (ssh,) = [pid for pid in _programs(bed, 1, b"host_functions") if f"{NETWORK}.2".encode() in _command_line(pid)]
        os.kill(ssh, signal.SIGKILL)
        while _programs(bed, 2, b"doctor") or _programs(bed, 2, b"torch.distributed.run"):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        running.kill()
        running.wait()
    while any(_programs(bed, number, b"doctor") for number in (1, 2, 3)):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not list(bed.shared.glob(".ds_finetune-doctor-*"))


def _wrong_hosts(bed: Bed) -> dict[str, str]:
    """Names of ssh's configuration for the second host, with a key it does not know, and with a host key it no longer
    has; the environment for it.
    """
    for kind in ("other-key", "other-host-key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(bed.folder / kind)], check=True)
    (bed.folder / "changed_hosts").write_text(f"{NETWORK}.2 {(bed.folder / 'other-host-key.pub').read_text()}")
    config = bed.shared / "ssh_config"
    config.write_text(
        "".join(
            f"Host {name}\n  HostName {NETWORK}.2\n  HostKeyAlias {NETWORK}.2\n  IdentitiesOnly yes\n"
            f"  IdentityFile {bed.folder}/{key}\n  UserKnownHostsFile {bed.folder}/{known}\n"
            for name, key, known in (
                ("twin", "key", "known_hosts"),
                ("stranger", "other-key", "known_hosts"),
                ("renewed", "key", "changed_hosts"),
            )
        )
        + bed.ssh_config.read_text()
    )
    fake = bed.folder / "own-2" / "fake" / "torch-9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    return {
        "PYTHONPATH": f"{bed.own}/fake:{ROOT}",
        "DS_FINETUNE_SSH_ARGS": f"-F {config} -o ConnectTimeout=3",
    }


@contextlib.contextmanager
def _port_held(bed: Bed) -> Iterator[int]:
    """Another program of the first host listens; yields its process."""
    holder = subprocess.Popen(
        bed.command(1, [sys.executable, "-m", "http.server", str(_PORT)]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    code = f"import socket; socket.create_connection(('127.0.0.1', {_PORT}), 1)"
    until = time.monotonic() + 120
    try:
        while bed.run(1, [sys.executable, "-c", code], timeout=60).returncode:
            assert time.monotonic() < until
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


def test_everything_wrong_is_named_with_its_host(bed: Bed) -> None:
    """A pulled cable, a wrong key, a changed host key, an unknown name, another torch, one host twice, a taken
    port, no interface, no shared folder, and a batch that cannot be shared out: in one run.
    """
    names = (f"{NETWORK}.1", f"{NETWORK}.2", "twin", "stranger", "renewed", "no-such-host", f"{NETWORK}.3")
    hosts = bed.shared / "wrong"
    hosts.write_text("".join(f"{name} slots=64\n" for name in names))
    environ = _wrong_hosts(bed)
    run_file = str(tiny_task(bed.shared / "wrong-task", output_dir=str(bed.own / "run")))
    bed.cable(3, plugged=False)
    try:
        with _port_held(bed) as pid:
            code, found = _doctor(bed, run_file, "--hostfile", str(hosts), "--port", str(_PORT), environ=environ)
    finally:
        bed.cable(3, plugged=True)
    wrong = _wrong(found)
    assert code == 2
    assert re.search("No route to host|timed out", wrong[f"{NETWORK}.3", "ssh"])
    assert "Permission denied" in wrong["stranger", "ssh"]
    assert "Host key verification failed" in wrong["renewed", "ssh"]
    assert "Could not resolve hostname" in wrong["no-such-host", "ssh"]
    assert "torch 9.9 (here " in wrong[f"{NETWORK}.2", "versions"]
    assert f"the same machine as {NETWORK}.2" in wrong["twin", "address"]
    assert f"port {_PORT} is taken: process {pid}, python" in wrong[f"{NETWORK}.1", "port"]
    assert {check["host"] for check in found if check["name"] == "devices" and check["state"] == "warn"} == {
        *names[:2],
        "twin",
    }
    assert "global_batch_size 8 " in wrong["", "plan"]
    assert wrong["twin", "folders"].endswith(f"is not shared with {NETWORK}.1")
    assert {host for host, _ in wrong} == {*names, ""}
    assert not _left(bed)


@pytest.mark.slow
def test_a_host_that_goes_silent_is_named_in_time(bed: Bed) -> None:
    """The cable is pulled while the network is measured."""
    with _slow(bed, 2):
        running, until = _started(bed), time.monotonic() + SECONDS
        while not _programs(bed, 3, b"doctor.measure"):
            assert running.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        bed.cable(3, plugged=False)
        try:
            printed, _ = running.communicate(timeout=SECONDS)
        finally:
            bed.cable(3, plugged=True)
    assert running.returncode == 2
    wrong = _wrong(json.loads(printed))
    assert list(wrong) == [(f"{NETWORK}.3", "ssh")]
    assert "not responding" in wrong[f"{NETWORK}.3", "ssh"]

"""The doctor on three hosts: ready ones, and each thing that can be wrong with one, named with its host."""

import contextlib
import json
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
_SHAPE = ("root", "tbf", "rate", "20mbit", "burst", "64kb", "latency", "400ms")
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


def _wrong(found: Found) -> dict[tuple[str, str], str]:
    return {(check["host"], check["name"]): check["found"] for check in found if check["state"] == "fail"}


def _left(bed: Bed) -> list[int]:
    """Probes that still run on any host."""
    lines = {pid: Path(f"/proc/{pid}/cmdline") for host in bed.hosts for pid in host.pids()}
    return [pid for pid, line in lines.items() if line.exists() and b"doctor" in line.read_bytes()]


@contextlib.contextmanager
def _slow(bed: Bed, number: int) -> Iterator[None]:
    """What a host sends is held to 20 Mbit a second."""
    shaped = bed.run(number, ["tc", "qdisc", "add", "dev", INTERFACE, *_SHAPE], timeout=10)
    if shaped.returncode:
        pytest.skip(f"this kernel holds no interface back: {shaped.stderr.strip()}")
    try:
        yield
    finally:
        bed.run(number, ["tc", "qdisc", "del", "dev", INTERFACE, "root"], timeout=10)


def test_ready_hosts_then_a_slow_one(bed: Bed) -> None:
    hosts = str(bed.hostfile(1, 1, 1))
    run_file = tiny_task(bed.shared / "task", train={"global_batch_size": 12})
    code, found = _doctor(bed, str(run_file), "--hostfile", hosts)
    assert (code, _wrong(found)) == (0, {})
    by_name = {check["name"] for check in found if check["state"] == "ok"}
    assert {
        "ssh",
        "clock",
        "versions",
        "devices",
        "port",
        "name",
        "links",
        "all-reduce",
        "all-gather",
        "folders",
    } <= by_name
    assert {"plan", "files", "disk", "memory"} <= by_name
    assert len([check for check in found if check["name"] == "ssh"]) == 3
    with _slow(bed, 3):
        code, found = _doctor(bed, "--hostfile", hosts)
    assert code == 2
    assert list(_wrong(found)) == [(f"{NETWORK}.3", "links")]
    assert _wrong(found)[f"{NETWORK}.3", "links"].startswith("sends ")
    assert not _left(bed)
    assert not list(bed.folder.rglob(".ds_finetune-doctor-*"))


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
        "GLOO_SOCKET_IFNAME": "e7",
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
    assert "does not answer" in wrong[f"{NETWORK}.3", "ssh"]
    assert "does not accept our key" in wrong["stranger", "ssh"]
    assert "host key has changed" in wrong["renewed", "ssh"]
    assert "its name does not resolve" in wrong["no-such-host", "ssh"]
    assert "torch 9.9 (here " in wrong[f"{NETWORK}.2", "versions"]
    assert f"the same machine as {NETWORK}.2" in wrong["twin", "address"]
    assert f"port {_PORT} is taken: process {pid}, python" in wrong[f"{NETWORK}.1", "port"]
    assert (
        wrong[f"{NETWORK}.1", "interface"] == "GLOO_SOCKET_IFNAME e7: no interface `e7` that is up and has an address"
    )
    assert {check["host"] for check in found if check["name"] == "devices" and check["state"] == "warn"} == {
        *names[:2],
        "twin",
    }
    assert "global_batch_size 8 " in wrong["", "plan"]
    assert wrong[f"{NETWORK}.1", "folders"].endswith(f"is not the one of {NETWORK}.2, twin")
    assert {host for host, _ in wrong} == {*names, ""}
    assert not _left(bed)


@pytest.mark.slow
def test_a_host_that_goes_silent_is_named_in_time(bed: Bed) -> None:
    """The cable is pulled while the network is measured."""
    given = {
        "DS_FINETUNE_SSH_ARGS": f"-F {bed.ssh_config}",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    command = [
        "env",
        *(f"{name}={value}" for name, value in given.items()),
        sys.executable,
        "-m",
        "ds_finetune",
        "doctor",
        "--json",
    ]
    with _slow(bed, 2):
        began = time.monotonic()
        running = subprocess.Popen(
            bed.command(1, [*command, "--hostfile", str(bed.hostfile(1, 1, 1))]), stdout=subprocess.PIPE, text=True
        )
        while not any(b"doctor.probe" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in bed.hosts[2].pids()):
            time.sleep(0.1)
        time.sleep(4)
        bed.cable(3, plugged=False)
        try:
            printed, _ = running.communicate(timeout=SECONDS)
        finally:
            bed.cable(3, plugged=True)
    assert running.returncode == 2
    assert time.monotonic() - began < 120
    wrong = _wrong(json.loads(printed))
    assert list(wrong) == [(f"{NETWORK}.3", "ssh")]
    assert "does not answer" in wrong[f"{NETWORK}.3", "ssh"]

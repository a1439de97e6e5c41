"""What a host says of itself before anything is started on it; with little imported, so that it is said at once."""

import importlib.metadata
import os
import platform
import socket
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("ds_finetune", "torch", "deepspeed", "transformers")


def facts(port: int = 0) -> dict[str, Any]:
    """Name, versions, devices, interfaces and a free port of this host, as plain values; of `port`, whether it is free,
    0 where it is not.
    """
    return {
        "hostname": socket.gethostname(),
        "machine": f"{_read('/proc/sys/kernel/random/boot_id')} {_link('/proc/self/ns/net')}",
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "devices": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        "interfaces": interfaces(),
        "asked_from": os.environ.get("SSH_CONNECTION", "").split()[:1],
        "reached_at": os.environ.get("SSH_CONNECTION", "").split()[2:3],
        "port": free_port(port),
    }


def interfaces() -> dict[str, list[str]]:
    """Addresses of each interface that is up."""
    is_up = {name: state.isup for name, state in psutil.net_if_stats().items()}
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [a.address.partition("%")[0] for a in addresses if a.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if is_up.get(name)}


def interface_towards(address: str) -> str:
    """Name of the interface by which this host reaches `address`, or that has it; empty where there is no way. Nothing
    is sent.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        try:
            # Connecting a datagram socket chooses the own address, without a packet.
            tried.connect((address, 9))
        except OSError:
            return ""
        own = str(tried.getsockname()[0])
    # The kernel gives packets to an own address to the loopback interface, and the own address as their source.
    return next((name for name, addresses in interfaces().items() if own in addresses), "")


def free_port(wanted: int = 0) -> int:
    """A port that nobody listens on at this moment: `wanted`, or any; 0 where `wanted` is taken."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", wanted))
        except OSError:
            return 0
        return int(tried.getsockname()[1])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""

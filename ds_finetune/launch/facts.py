"""What a host says of itself before anything is started on it; the standard library alone, so that it is said at once."""

import importlib.metadata
import os
import platform
import socket
import struct
from fcntl import ioctl
from pathlib import Path
from typing import Any

PACKAGES = ("ds_finetune", "torch", "deepspeed", "transformers")
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of netdevice(7)."""


def facts(port: int = 0) -> dict[str, Any]:
    """Name, versions, devices, interfaces and a free port of this host, as plain values; of `port`, whether it is free, 0 where it is not."""
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


def interfaces() -> dict[str, str]:
    """IPv4 address of each network interface; empty where it has none."""
    return {name: _address(name) for _, name in socket.if_nameindex()}


def interface_towards(address: str) -> str:
    """The interface from which this host reaches `address`, or has it; empty where that cannot be told."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        try:
            tried.connect((address, 9))
        except OSError:
            return ""
        own = tried.getsockname()[0]
    found = [name for name, known in interfaces().items() if known == own]
    if found == ["lo"]:
        # A packet to oneself goes through the loopback; the address lies on another interface.
        found = [name for name, known in interfaces().items() if known == address and name != "lo"] or found
    return found[0] if found else ""


def free_port(wanted: int = 0) -> int:
    """A port that nobody listens on at this moment: `wanted`, or any; 0 where `wanted` is taken."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", wanted))
        except OSError:
            return 0
        return int(tried.getsockname()[1])


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


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

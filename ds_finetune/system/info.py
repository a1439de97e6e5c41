"""Collects facts of a host: versions, GPUs, network interfaces, and the port on which rank 0 listens.

This module does not import torch, so that a host responds in a fraction of a second.
"""

import csv
import hashlib
import os
import platform
import runpy
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import psutil

import ds_finetune
from ds_finetune.config.units import MIB
from ds_finetune.system.processes import own_namespace
from ds_finetune.system.versions import installed_versions

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")
"""Names of the packages whose versions must be the same on every host."""
_SMI_SECONDS = 30
_DIGITS = 10


@dataclass(frozen=True)
class HostInfo:
    """Facts of a host that decide whether a run can start on it."""

    hostname: str
    network_identity: str
    """Boot id and network namespace: equal for two names of one host, different for two containers of a machine."""
    versions: dict[str, str]
    """Versions of Python, this program (with its source's hash), packages, CUDA, NCCL and GPU driver, "" if absent."""
    packages: dict[str, str]
    """Version of each package that has a tested range; "" where it is not installed."""
    gpus: list[str]
    """Models of the host's GPUs."""
    cores: int
    interfaces: dict[str, list[str]]
    """Addresses of each network interface of the host that is up."""
    ssh_client: str
    """Address of the ssh client that connected to this host; empty without ssh."""
    ssh_server_address: str
    """Address of this host at which its ssh client connected; empty without ssh."""
    port: int
    """The requested port, or a free port if none was requested; 0 if the requested port is in use."""
    port_holder: str | None
    """Process that uses the requested port; None if the port is free or none was requested."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it. Memory is in bytes, or None where nvidia-smi does not report it.

    nvidia-smi reports no memory for GPUs that share the host's memory. It reports the used memory of a GPU in MIG mode
    only to users with access.
    """

    name: str
    uuid: str
    total_bytes: int | None
    used_bytes: int | None
    compute_mode: str = ""
    """Whether several processes may share the GPU, in nvidia-smi's words; `Default` means yes."""


def gather_host_info(port: int = 0) -> HostInfo:
    """Collect the facts of this host; `port` is the requested port, or 0 for none."""
    client, _, address = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[:3]
    holder = _port_holder(port) if port else None
    return HostInfo(
        hostname=socket.gethostname(),
        network_identity=own_namespace("net"),
        versions=host_versions(packages := installed_versions()),
        packages=packages,
        gpus=gpu_models(),
        cores=len(os.sched_getaffinity(0)),
        interfaces=interfaces(),
        ssh_client=client,
        ssh_server_address=address,
        port=0 if holder else port or free_port(),
        port_holder=holder,
    )


def gpu_models() -> list[str]:
    """Model names of the GPUs, from the driver's files or, without these (WSL), from nvidia-smi."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    if not files:
        return [gpu.name for gpu in query_gpus()]
    texts = [_read(str(file / "information")) for file in files]
    return [
        next((line[6:].strip() for line in text.splitlines() if line.startswith("Model:")), "GPU") for text in texts
    ]


def query_gpus() -> list[Gpu]:
    """GPUs with their memory; empty where nvidia-smi is not installed or finds no driver."""
    if not shutil.which("nvidia-smi"):
        return []
    query = [
        "nvidia-smi",
        "--query-gpu=name,uuid,memory.total,memory.used,compute_mode",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True) if done.returncode == 0 else ()
    return [Gpu(name, uuid, _mib(total), _mib(used), mode) for name, uuid, total, used, mode in rows]


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.isdigit() else None


def interfaces() -> dict[str, list[str]]:
    """Addresses of each network interface of this host that is up."""
    is_up = {name: state.isup for name, state in psutil.net_if_stats().items()}
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: texts for name, texts in addresses.items() if is_up.get(name)}


def interface_towards(address: str) -> str:
    """Network interface by which this host reaches `address`. For an address of this host, the interface that has the
    address; empty without a route. Sends nothing.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as connection:
        try:
            # Connecting a datagram socket selects the source address without sending a packet.
            connection.connect((address, 9))
        except OSError:
            return ""
        own = str(connection.getsockname()[0])
    # For an address of this host, the kernel takes the loopback interface, and the address itself as the source.
    return next((name for name, addresses in interfaces().items() if own in addresses), "")


def free_port() -> int:
    """Find a port on which no process listens at this moment."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])


def host_versions(packages: Mapping[str, str]) -> dict[str, str]:
    """Versions of Python, this program, PACKAGES (taken from `packages`), torch's CUDA, NCCL and the GPU driver."""
    versions = {"python": platform.python_version(), "ds_finetune": source_version()}
    versions |= {package: packages.get(package, "") for package in PACKAGES}
    spec = find_spec("torch")
    about = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    versions["CUDA of torch"] = str(runpy.run_path(str(about)).get("cuda") or "") if about and about.is_file() else ""
    # NCCL comes with torch's wheels as the package nvidia-nccl-cu12 or -cu13.
    versions["NCCL"] = next(
        (str(d.version) for d in distributions() if str(d.metadata["Name"]).startswith("nvidia-nccl-cu")), ""
    )
    versions["driver"] = _read("/sys/module/nvidia/version")
    return versions


@cache
def source_version() -> str:
    """Version of ds_finetune with a hash of its files, because a development version may have different files."""
    folder = Path(ds_finetune.__file__).parent
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))))
    return f"{ds_finetune.__version__} (source {content.hexdigest()[:_DIGITS]})"


def _port_holder(port: int) -> str | None:
    with socket.socket() as listening:
        # With SO_REUSEADDR, as in torch's TCPStore, a port with only connections in TIME_WAIT counts as free.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("", port))
        except OSError as taken:
            return _process_at(port) or str(taken.strerror)
    return None


def _process_at(port: int) -> str:
    with suppress(psutil.AccessDenied, psutil.NoSuchProcess):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                return f"process {each.pid}, {psutil.Process(each.pid).name()}"
    return ""


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8").strip()
    return ""

"""What a host is: versions, devices, limits, interfaces, folders, as plain values that can be sent and compared.
Imports no torch.
"""

import csv
import hashlib
import os
import platform
import resource
import runpy
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

import ds_finetune
from ds_finetune.launch.host_info import interfaces
from ds_finetune.trainer.run_dir import available_bytes, bytes_of, nearest_existing

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")
"""Packages whose versions must be the same on every host."""
_SMI_SECONDS = 30
_DIGITS = 10


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi numbers it; bytes of its memory."""

    name: str
    uuid: str
    total_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class Folder:
    """A folder that a run will use: the nearest that exists on its way, whether it can be written, free bytes, and
    bytes of a run that is in it.
    """

    existing: str
    is_writable: bool
    free_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class HostQuery:
    """What a host is asked: environment to carry, the first host's name, the port to try (0 for none), folders and
    files of the run.
    """

    environ: dict[str, str] = field(default_factory=dict)
    first: str = ""
    port: int = 0
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a host answers; sizes in bytes, limits -1 where there is none."""

    hostname: str
    machine: str
    """Boot and network namespace: the same for two names of one host, other for two containers of one machine."""
    versions: dict[str, str]
    """Python, packages, this program's source, and CUDA, NCCL and driver where there are; "" for what is not installed.
    """
    gpus: list[Gpu]
    cores: int
    memory_bytes: int | None
    open_files: int
    locked_bytes: int
    shm_bytes: int
    interfaces: dict[str, list[str]]
    """Addresses of each interface that is up."""
    has_infiniband: bool
    first: list[str]
    """Addresses that the first host's name leads to here; none where it does not resolve."""
    ssh_address: str
    """Own address that ssh came in by; empty without ssh."""
    port_holder: str | None
    """Who holds the port that was asked for; None where it is free or none was asked for."""
    folders: dict[str, Folder]
    files: dict[str, str | None]
    """Sum of each file or folder's names and sizes (and JSON contents); None where it is not there."""

    @classmethod
    def read(cls, tree: dict[str, Any]) -> "Facts":
        """From what JSON made of it."""
        gpus = [Gpu(**gpu) for gpu in tree["gpus"]]
        folders = {path: Folder(**folder) for path, folder in tree["folders"].items()}
        return cls(**{**tree, "gpus": gpus, "folders": folders})


def gather(asked: HostQuery) -> Facts:
    """The facts of this host, in about a second."""
    return Facts(
        hostname=socket.gethostname(),
        machine=f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}",
        versions=_versions(),
        gpus=gpus(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=available_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        interfaces=interfaces(),
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        first=_addresses(asked.first),
        ssh_address=(os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
        port_holder=_holder(asked.port) if asked.port else None,
        folders={path: _folder(Path(path)) for path in asked.folders},
        files={path: _sum(Path(path)) for path in asked.files},
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "ds_finetune": _source()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    spec = find_spec("torch")
    about = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    found["CUDA of torch"] = str(runpy.run_path(str(about)).get("cuda") or "") if about and about.is_file() else ""
    # torch's wheels bring NCCL as nvidia-nccl-cu12 or -cu13.
    found["NCCL"] = next(
        (str(d.version) for d in distributions() if str(d.metadata["Name"]).startswith("nvidia-nccl-cu")), ""
    )
    driver = Path("/sys/module/nvidia/version")
    found["driver"] = driver.read_text().strip() if driver.is_file() else ""
    return found


def _source() -> str:
    """Version and a sum of this program's own files, which a host may have other than its neighbour."""
    folder = Path(ds_finetune.__file__).parent
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))))
    return f"{ds_finetune.__version__} (source {content.hexdigest()[:_DIGITS]})"


def gpus() -> list[Gpu]:
    """By nvidia-smi; none where it is not there or finds no driver."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,uuid,memory.total,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True) if done.returncode == 0 else ()
    return [Gpu(name, uuid, int(total) << 20, int(used) << 20) for name, uuid, total, used in rows]


def _addresses(name: str) -> list[str]:
    try:
        return (
            list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)))
            if name
            else []
        )
    except OSError:
        return []


def _holder(port: int) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        # As TCPStore listens: a port that a connection of before still lingers on is free.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError as taken:
            return _process_at(port) or str(taken.strerror)
    return None


def _process_at(port: int) -> str:
    try:
        pids = [
            c.pid
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid
        ]
        return f"process {pids[0]}, {psutil.Process(pids[0]).name()}" if pids else ""
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return ""


def _folder(path: Path) -> Folder:
    existing = nearest_existing(path)
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    held = bytes_of(path) if (path / "metrics.jsonl").exists() else 0
    return Folder(str(existing), is_writable, shutil.disk_usage(existing).free, held)


def _sum(path: Path) -> str | None:
    if not path.exists():
        return None
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    content = hashlib.sha256()
    for file in files:
        content.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
        content.update(file.read_bytes() if path.is_dir() and file.suffix == ".json" else b"")
    return content.hexdigest()[:_DIGITS]

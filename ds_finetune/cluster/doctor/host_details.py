"""The facts of a host that only the doctor needs: limits, memory, name lookup, folders and files of the run."""

import ctypes
import hashlib
import os
import resource
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path

from ds_finetune.system.free_memory import available_bytes
from ds_finetune.system.info import Gpu, HostInfo, gather_host_info, query_gpus
from ds_finetune.trainer.run_dir import bytes_of, nearest_existing

_DIGITS = 10


@dataclass(frozen=True)
class FolderInfo:
    """A folder that a run will use, or the nearest existing folder above it; sizes in bytes."""

    existing: str
    is_writable: bool
    free_bytes: int
    held_bytes: int
    """Bytes of an earlier run in the folder; the next run overwrites them."""


@dataclass(frozen=True)
class HostQuery:
    """What a host needs to know to gather its `HostDetails`."""

    environ: dict[str, str] = field(default_factory=dict)
    """Environment variables that the host sets before it answers."""
    first_host: str = ""
    """Name of the first host, to be resolved on the host."""
    port: int = 0
    """Port that has to be free; 0 for none."""
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostDetails(HostInfo):
    """The facts that the doctor checks; sizes in bytes, limits -1 where there is none."""

    gpu_memory: list[Gpu]
    """GPUs that nvidia-smi lists."""
    memory_bytes: int | None
    open_files: int
    locked_bytes: int
    shm_bytes: int
    has_infiniband: bool
    has_ibverbs: bool
    """Whether the library is there by which NCCL uses InfiniBand."""
    first_host_addresses: list[str]
    """Addresses that the first host's name resolves to here; empty where it does not resolve."""
    folders: dict[str, FolderInfo]
    files: dict[str, str | None]
    """Hash of names and sizes (and of JSON contents) of each file or folder; None where it does not exist."""


def gather_details(query: HostQuery) -> HostDetails:
    """The facts of this host, in about a second."""
    return HostDetails(
        **vars(gather_host_info(query.port)),
        gpu_memory=query_gpus(),
        memory_bytes=available_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        has_ibverbs=_can_load("libibverbs.so.1"),
        first_host_addresses=_addresses(query.first_host),
        folders={path: _folder_info(Path(path)) for path in query.folders},
        files={path: _hash(Path(path)) for path in query.files},
    )


def _addresses(name: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM) if name else []
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _folder_info(path: Path) -> FolderInfo:
    existing = nearest_existing(path)
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    held = bytes_of(path) if (path / "metrics.jsonl").exists() else 0
    return FolderInfo(str(existing), is_writable, shutil.disk_usage(existing).free, held)


def _hash(path: Path) -> str | None:
    if not path.exists():
        return None
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    content = hashlib.sha256()
    for file in files:
        content.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
        content.update(file.read_bytes() if path.is_dir() and file.suffix == ".json" else b"")
    return content.hexdigest()[:_DIGITS]


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True

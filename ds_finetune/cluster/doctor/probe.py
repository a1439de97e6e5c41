"""The program that the doctor starts on each host, and again as a child for each request that may crash or hang."""

import contextlib
import ctypes
import hashlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ds_finetune.cluster.doctor import messages
from ds_finetune.cluster.doctor.session import PROBE, HostLostError, RefusedError, Session, answer_requests
from ds_finetune.plan.kernels import triton_problem
from ds_finetune.system.disk import bytes_below, nearest_existing
from ds_finetune.system.free_memory import available_bytes
from ds_finetune.system.info import free_port, gather_host_info, query_gpus
from ds_finetune.system.process_messages import ProcessMessage
from ds_finetune.system.processes import python_module, with_package

LIFE_SECONDS = 1800
"""A probe ends after this time even where its host can no longer be reached."""
_MARKER = ".ds_finetune-doctor-"
_DIGITS = 10
_markers: list[Path] = []


def _report_details(query: messages.HostQuery) -> messages.HostDetails:
    os.environ.update(query.environ)
    # ninja compiles DeepSpeed's operators. It is installed beside Python, and ssh leaves that folder out of PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return gather_details(query)


def gather_details(query: messages.HostQuery) -> messages.HostDetails:
    """The facts of this host, in about a second."""
    return messages.HostDetails(
        **vars(gather_host_info(query.port)),
        gpu_memory=query_gpus(),
        memory_bytes=available_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        has_ibverbs=_can_load("libibverbs.so.1"),
        triton_problem=list(triton_problem()),
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


def _folder_info(path: Path) -> messages.FolderInfo:
    existing = nearest_existing(path)
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    held = bytes_below(path) if (path / "metrics.jsonl").exists() else 0
    return messages.FolderInfo(str(existing), is_writable, shutil.disk_usage(existing).free, held)


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


def _place_markers(request: messages.PlaceMarkers) -> messages.MarkersPlaced:
    for folder in request.folders:
        path = nearest_existing(Path(folder)) / f"{_MARKER}{request.token}"
        # A missing marker shows that the folder is not writable.
        with contextlib.suppress(OSError):
            path.touch()
            _markers.append(path)
    return messages.MarkersPlaced()


def _find_markers(request: messages.FindMarkers) -> messages.MarkersFound:
    visible = {}
    for folder in request.folders:
        path = nearest_existing(Path(folder))
        names = {entry.name for entry in os.scandir(path)} if path.is_dir() else set()
        visible[folder] = [token for token in request.tokens if f"{_MARKER}{token}" in names]
    return messages.MarkersFound(visible)


def _remove_markers() -> None:
    for path in _markers:
        with contextlib.suppress(OSError):
            path.unlink()


def _build_op(request: messages.BuildOp) -> messages.OpBuilt:
    from ds_finetune.engine.ops.deepspeed_ops import check_op

    return messages.OpBuilt(check_op(request.name, request.settings))


def _measure_network(place: messages.NetworkRank) -> messages.NetworkResult:
    from ds_finetune.cluster.doctor.network import measure

    return measure(place)


def _run_in_children(request: messages.RunInChildren) -> messages.ChildReplies:
    sessions = [_start_child() for _ in request.requests]
    until = time.monotonic() + request.seconds
    for session, child_request in zip(sessions, request.requests, strict=True):
        session.send(child_request)
    replies = [
        _child_reply(session, child_request, max(0.0, until - time.monotonic()))
        for session, child_request in zip(sessions, request.requests, strict=True)
    ]
    for session in sessions:
        session.end()
    return messages.ChildReplies(replies)


def _child_reply(session: Session, request: ProcessMessage, seconds: float) -> messages.ChildReply:
    try:
        if isinstance(request, messages.BuildOp):
            return session.receive(messages.OpBuilt, seconds=seconds)
        return session.receive(messages.NetworkResult, seconds=seconds)
    except RefusedError as refused:
        return messages.RequestRefused(refused.message, refused.hint)
    except HostLostError as lost:
        return messages.ChildLost(lost.code, lost.stderr)


def _start_child() -> Session:
    def start(stderr: IO[bytes]) -> "subprocess.Popen[bytes]":
        pipe, environ = subprocess.PIPE, with_package(os.environ)
        return subprocess.Popen(
            python_module(PROBE), env=environ, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True
        )

    return Session(start, messages.REPLIES, peer="a child of the probe")


HANDLERS: dict[type[ProcessMessage], Callable[[Any], ProcessMessage]] = {
    messages.HostQuery: _report_details,
    messages.TimeRequest: lambda _: messages.TimeReply(time.time()),
    messages.PlaceMarkers: _place_markers,
    messages.FindMarkers: _find_markers,
    messages.FreePortRequest: lambda _: messages.FreePortReply(free_port()),
    messages.BuildOp: _build_op,
    messages.NetworkRank: _measure_network,
    messages.RunInChildren: _run_in_children,
}

if __name__ == "__main__":
    answer_requests(HANDLERS, seconds=LIFE_SECONDS, at_end=_remove_markers)

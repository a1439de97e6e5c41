"""The program that the doctor starts on each host, and again as a child for each request that may crash or hang."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_finetune.cluster.doctor.host_details import gather_details
from ds_finetune.cluster.doctor.messages import (
    REPLIES,
    BuildOp,
    ChildLost,
    ChildReplies,
    ChildReply,
    DetailsReply,
    DetailsRequest,
    FindMarkers,
    FreePortReply,
    FreePortRequest,
    MarkersFound,
    MarkersPlaced,
    MeasureNetwork,
    NetworkMeasured,
    OpBuilt,
    PlaceMarkers,
    RequestRefused,
    RunInChildren,
    TimeReply,
    TimeRequest,
)
from ds_finetune.cluster.doctor.network import measure
from ds_finetune.cluster.doctor.session import HostLostError, RefusedError, Session, answer_requests
from ds_finetune.system.info import free_port
from ds_finetune.system.process_messages import ProcessMessage
from ds_finetune.trainer.run_dir import nearest_existing

MODULE = "ds_finetune.cluster.doctor.probe"
LIFE_SECONDS = 1800
"""A probe ends after this time even where its host can no longer be reached."""
_MARKER = ".ds_finetune-doctor-"
_markers: list[Path] = []


def _report_details(request: DetailsRequest) -> DetailsReply:
    os.environ.update(request.query.environ)
    # ninja compiles DeepSpeed's operators. It is installed beside Python, and ssh leaves that folder out of PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return DetailsReply(gather_details(request.query))


def _place_markers(request: PlaceMarkers) -> MarkersPlaced:
    for folder in request.folders:
        path = nearest_existing(Path(folder)) / f"{_MARKER}{request.token}"
        # A missing marker shows that the folder is not writable.
        with contextlib.suppress(OSError):
            path.touch()
            _markers.append(path)
    return MarkersPlaced()


def _find_markers(request: FindMarkers) -> MarkersFound:
    visible = {}
    for folder in request.folders:
        path = nearest_existing(Path(folder))
        names = {entry.name for entry in os.scandir(path)} if path.is_dir() else set()
        visible[folder] = [token for token in request.tokens if f"{_MARKER}{token}" in names]
    return MarkersFound(visible)


def _remove_markers() -> None:
    for path in _markers:
        with contextlib.suppress(OSError):
            path.unlink()


def _build_op(request: BuildOp) -> OpBuilt:
    from ds_finetune.engine.ops.deepspeed_ops import check_op

    return OpBuilt(check_op(request.name, request.settings))


def _run_in_children(request: RunInChildren) -> ChildReplies:
    sessions = [_start_child() for _ in request.requests]
    until = time.monotonic() + request.seconds
    for session, child_request in zip(sessions, request.requests, strict=True):
        session.send(child_request)
    replies = []
    for session, child_request in zip(sessions, request.requests, strict=True):
        replies.append(_child_reply(session, child_request, max(0.0, until - time.monotonic())))
    for session in sessions:
        session.end()
    return ChildReplies(replies)


def _child_reply(session: Session, request: ProcessMessage, seconds: float) -> ChildReply:
    try:
        if isinstance(request, BuildOp):
            return session.receive(OpBuilt, seconds=seconds)
        return session.receive(NetworkMeasured, seconds=seconds)
    except RefusedError as refused:
        return RequestRefused(refused.message, refused.hint)
    except HostLostError as lost:
        return ChildLost(lost.code, lost.stderr)


def _start_child() -> Session:
    command = [sys.executable, "-m", MODULE]
    return Session(
        lambda stderr: subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        ),
        REPLIES,
        peer="a child of the probe",
    )


HANDLERS: dict[type[ProcessMessage], Callable[[Any], ProcessMessage]] = {
    DetailsRequest: _report_details,
    TimeRequest: lambda _: TimeReply(time.time()),
    PlaceMarkers: _place_markers,
    FindMarkers: _find_markers,
    FreePortRequest: lambda _: FreePortReply(free_port()),
    BuildOp: _build_op,
    MeasureNetwork: lambda request: NetworkMeasured(measure(request.place)),
    RunInChildren: _run_in_children,
}

if __name__ == "__main__":
    answer_requests(HANDLERS, seconds=LIFE_SECONDS, at_end=_remove_markers)

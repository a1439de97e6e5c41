"""The program that the doctor starts on each host, and again in processes of their own for what may crash or hang."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_finetune.doctor.host_details import HostQuery, gather_details
from ds_finetune.doctor.network import measure
from ds_finetune.doctor.session import HostLostError, RefusedError, Session, answer_requests
from ds_finetune.hosts.info import free_port
from ds_finetune.trainer.run_dir import nearest_existing

MODULE = "ds_finetune.doctor.probe"
LIFE_SECONDS = 1800
"""A probe ends by itself after this, should its host have lost the one who asks."""
_MARK = ".ds_finetune-doctor-"
_marks: list[Path] = []


def details(**query: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON of a HostQuery
    """The facts of this host; later requests see the environment variables of the query."""
    os.environ.update(query["environ"])
    # ssh brings no PATH, and ninja, which compiles DeepSpeed's ops, lies beside Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return asdict(gather_details(HostQuery(**query)))


def mark(folders: list[str], token: str) -> None:
    """Leave a file with `token` in each folder, or in the nearest above it that exists, for as long as this program
    runs.

    One that cannot be written is noticed by who looks.
    """
    for folder in folders:
        path = nearest_existing(Path(folder)) / f"{_MARK}{token}"
        with contextlib.suppress(OSError):
            path.touch()
            _marks.append(path)


def look(folders: list[str], tokens: list[str]) -> dict[str, list[str]]:
    """Which tokens are seen in each folder."""
    found = {}
    for folder in folders:
        place = nearest_existing(Path(folder))
        names = {entry.name for entry in os.scandir(place)} if place.is_dir() else set()
        found[folder] = [token for token in tokens if f"{_MARK}{token}" in names]
    return found


def _unmark() -> None:
    for path in _marks:
        with contextlib.suppress(OSError):
            path.unlink()


def op(name: str, settings: dict[str, Any]) -> str:
    """Build and run one of DeepSpeed's ops; see `engine.ops`."""
    from ds_finetune.engine.deepspeed_ops import check_op

    return check_op(name, settings)


def apart(requests: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Answer requests each in a process of its own, at once; how one died is an answer: `lost` (exit code, None for too
    long) and `said`.
    """
    sessions = [_child() for _ in requests]
    until = time.monotonic() + seconds
    for session, request in zip(sessions, requests, strict=True):
        session.send(request.pop("do"), request)
    answers = []
    for session in sessions:
        try:
            answers.append({"value": session.receive(seconds=max(0.0, until - time.monotonic()))})
        except RefusedError as refused:
            answers.append({"refused": refused.message, "hint": refused.hint})
        except HostLostError as lost:
            answers.append({"lost": lost.code, "said": lost.said})
    for session in sessions:
        session.end()
    return answers


def _child() -> Session:
    command = [sys.executable, "-m", MODULE]
    return Session(
        lambda log: subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    )


VERBS: dict[str, Callable[..., object]] = {
    "details": details,
    "time": time.time,
    "mark": mark,
    "look": look,
    "free_port": free_port,
    "op": op,
    "measure": measure,
    "apart": apart,
}

if __name__ == "__main__":
    answer_requests(VERBS, seconds=LIFE_SECONDS, at_end=_unmark)

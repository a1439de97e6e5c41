"""A program that `doctor` and `launch` start on each host over ssh. It calls functions for them.

A request is a line of JSON on standard input with names of functions and their arguments. The reply is a line with the
results. It begins with a token, the last argument of the program, because a login shell may print other lines.

When standard input ends with the connection, or no line has arrived for some time, the program kills every process that
it has started, with their children, removes its files and ends.
"""

import atexit
import ctypes
import json
import os
import queue
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import psutil

from ds_finetune.system.info import gather_host_info

_IDLE_SECONDS = 300.0
_LATE_SECONDS = 2.0
_BECOME_SUBREAPER = 36
"""The constant PR_SET_CHILD_SUBREAPER of prctl(2). It makes orphaned descendants of this process its children."""
Functions = Mapping[str, Callable[..., Any]]
starting = threading.Lock()
"""Lock that is held while a process or a file is created. A program that ends never releases it."""
created_paths: list[Path] = []
"""Files and folders that this program removes when it ends."""


class HostProgram:
    """The host's end of the connection to `doctor` or `launch`. It reads requests, and sends replies and events."""

    def __init__(self) -> None:
        self._silent_seconds = _IDLE_SECONDS
        self.orders: dict[str, Callable[..., object]] = {
            "limit_silence": self.limit_silence,
            "save": lambda: None,
            "lose": lambda name: None,
        }
        """Functions that the launching program calls by these names. They run at once and send no reply. While ranks
        run, `save` saves a checkpoint and `lose` tells the ranks that a host is lost.
        """
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self.output: TextIO = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
        # Standard output is only for replies and events. What libraries print there is redirected to standard error.
        os.dup2(2, 1)

    def serve(self, functions: Functions) -> None:
        """Answer requests for `functions` one after another, until standard input ends."""
        with suppress(AttributeError):
            ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)
        atexit.register(_clean_up)
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            results = {name: functions[name](**arguments) for name, arguments in self._lines.get().items()}
            self._tell("reply", [time.time(), results])

    def limit_silence(self, seconds: float) -> None:
        """End the program once no line has arrived on standard input for this number of seconds."""
        self._silent_seconds = seconds

    def emit(self, event: Mapping[str, Any]) -> None:
        """Send an event to the requesting program. Events may precede the reply to a request."""
        self._tell("event", event)

    def _tell(self, kind: str, value: object) -> None:
        # One call writes the whole line, so that no text of another thread gets into it.
        self.output.write(f"{sys.argv[-1]} {json.dumps([kind, value])}\n")

    def _read(self) -> None:
        # sys.stdin is not used, because the interpreter would wait at exit for the lock of a thread that reads it.
        with open(0, "rb", buffering=0) as file:
            while self._is_readable() and (line := file.readline()):
                request = json.loads(line.strip() or b"{}")
                for name in self.orders.keys() & request.keys():
                    self.orders[name](**request.pop(name))
                if request:
                    self._lines.put(request)
        _clean_up()
        os._exit(0)

    def _is_readable(self) -> bool:
        # A wait far beyond its limit means that this process was suspended. That is no silence, so it waits again.
        while True:
            began = time.monotonic()
            if select.select([0], [], [], self._silent_seconds)[0]:
                return True
            if time.monotonic() - began < self._silent_seconds + _LATE_SECONDS:
                return False


def facts(environ: dict[str, str], port: int) -> dict[str, Any]:
    """Add `environ` to this process's environment variables, and return the facts of this host (HostInfo)."""
    os.environ.update(environ)
    return asdict(gather_host_info(port))


def kill_children() -> None:
    """Kill all descendants of this process."""
    # A child may start another process before it dies. That process becomes a child of this one, so the loop continues.
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        if psutil.wait_procs(children, timeout=5)[1]:
            return


def _clean_up() -> None:
    starting.acquire()
    kill_children()
    for path in created_paths:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)

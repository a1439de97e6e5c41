"""A conversation with a program on a host: one JSON object a line each way, so that a host is asked many things for one
start of Python.

An answer carries the id of its request, by which it is told from what a login shell prints.
"""

import contextlib
import json
import os
import queue
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any

from ds_finetune.errors import FinetuneError

_TAIL_BYTES = 20_000
_END_SECONDS = 5.0


class HostLostError(Exception):
    """The other side ended (`code`), or did not answer in time (`code` None), with what it had written to standard
    error.
    """

    def __init__(self, code: int | None, said: str) -> None:
        super().__init__(f"exit code {code}: {said}")
        self.code, self.said = code, said


class RefusedError(Exception):
    """The other side answered with a FinetuneError: its message, and the way out."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Session:
    """The asking side; `start` gets a file for the standard error of the process it returns, which has pipes for input
    and output.
    """

    def __init__(self, start: Callable[[IO[bytes]], "subprocess.Popen[bytes]"]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.process = start(self._log)
        self._rest = b""
        self._asked: deque[str] = deque()

    def ask(self, verb: str, arguments: Mapping[str, object] | None = None, *, seconds: float) -> Any:  # noqa: ANN401 - any JSON
        """The answer to one request; HostLostError or RefusedError where there is none, the first after `seconds` at
        most.
        """
        self.send(verb, arguments or {})
        return self.receive(seconds=seconds)

    def send(self, verb: str, arguments: Mapping[str, object]) -> None:
        """Put a request on its way; a side that has ended is noticed by `receive`."""
        assert self.process.stdin
        self._asked.append(secrets.token_hex(8))
        with contextlib.suppress(OSError):
            request = {"do": verb, "id": self._asked[-1], "arguments": arguments}
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, *, seconds: float) -> Any:  # noqa: ANN401 - any JSON
        """The answer to the oldest request that has none yet."""
        number, until = self._asked.popleft(), time.monotonic() + seconds
        while (answer := _answer_to(number, self._line(until - time.monotonic()))) is None:
            continue
        if "refused" in answer:
            raise RefusedError(answer["refused"], answer["hint"])
        return answer["value"]

    def said(self) -> str:
        """The end of what the other side, or ssh, wrote to standard error."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def end(self) -> None:
        """Close the conversation, which ends the other side; what is not gone after a moment is killed here."""
        assert self.process.stdin
        assert self.process.stdout
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._log.close()

    def _line(self, seconds: float) -> bytes:
        assert self.process.stdout
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise HostLostError(None, self.said())
                piece = os.read(self.process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise HostLostError(self.process.wait(), self.said())
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _answer_to(number: str, line: bytes) -> dict[str, Any] | None:
    """The answer to a request; None for a line that is none."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and answer.get("id") == number else None


def answer_requests(
    verbs: Mapping[str, Callable[..., object]], *, seconds: int, at_end: Callable[[], None] = lambda: None
) -> None:
    """The answering side: call the verb that each line of standard input names, until input ends; then `at_end`.

    The process and what it started end with the input, whatever they are doing, and after `seconds` in any case.
    What libraries print goes to standard error. A FinetuneError is an answer; another exception ends the process,
    and its text is what the asking side gets.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()
    signal.alarm(seconds)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # A line of its own, whatever a login shell has printed before without an end.
    answers.write("\n")
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(requests, at_end), daemon=True).start()
    while True:
        request = requests.get()
        try:
            answer = {"value": verbs[request["do"]](**request["arguments"])}
        except FinetuneError as error:
            answer = {"refused": error.message, "hint": error.hint}
        answers.write(json.dumps({"id": request["id"], **answer}) + "\n")
        answers.flush()


def _listen(requests: "queue.Queue[dict[str, Any]]", at_end: Callable[[], None]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    at_end()
    # The group holds compilers that an op's build has started.
    os.killpg(os.getpgrp(), signal.SIGKILL)

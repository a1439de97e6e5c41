"""What a launcher starts in a test instead of a Python program: it has the fork server be that program, with this
process's variables, arguments, folder and output, and ends as it ends.

Started as `launched.py FILE [ARGUMENT...]`, perhaps with an option of the launcher before the file; it imports nothing
that takes time.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOCKET = "TESTS_FORK_SERVER"
"""Names the socket of the fork server in the environment."""


def main() -> int:
    """The exit code of the program."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = sys.argv[1:]
        program = words.pop(next(place for place, word in enumerate(words) if not word.startswith("-")))
        request = {"program": [program, *words], "environ": dict(os.environ), "ranks": 0}
        request |= {"folder": name, "cwd": str(Path.cwd())}
        ask(os.environ[SOCKET], request, outputs=(1, 2))
        pid = _number(folder / "pid")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        return _number(folder / "code")


def ask(address: str, request: Mapping[str, Any], *, outputs: Sequence[int] = ()) -> None:
    """Ask the fork server at a socket; the fork prints to `outputs`, where they are not files of the request."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        while not Path(address).exists():
            time.sleep(0.01)
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode()], list(outputs))


def _number(file: Path) -> int:
    while not file.exists():
        time.sleep(0.01)
    return int(file.read_text())


if __name__ == "__main__":
    code = main()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)

"""Appends to a file whole or not at all, so that a full disk leaves no part of a record behind."""

import os
from functools import partial
from io import FileIO
from pathlib import Path

from ds_finetune.console.phase_line import Say
from ds_finetune.observers.outage import Outage


class LineFile:
    """A file to which lines are appended at once; where the disk is full, they wait (`Outage`)."""

    def __init__(self, path: Path, say: Say) -> None:
        self._file = path.open("ab", buffering=0)
        self._lines = Outage(str(path), partial(append_whole, self._file), say)

    def put(self, line: str) -> None:
        """Append a line, which ends with a newline."""
        self._lines.put(line.encode())

    def close(self) -> None:
        """Write queued lines and close the file."""
        self._lines.close()
        self._file.close()


def append_whole(file: FileIO, data: bytes) -> None:
    """Append `data` to an unbuffered file; with an OSError nothing of it remains."""
    end, written = file.seek(0, os.SEEK_END), 0
    try:
        while written < len(data):
            written += file.write(data[written:])
    except OSError:
        file.truncate(end)
        raise

"""Appends to a file whole or not at all, so that a full disk leaves no part of a record behind."""

import os
from io import FileIO


def append_whole(file: FileIO, data: bytes) -> None:
    """Append `data` to an unbuffered file; with an OSError nothing of it remains."""
    end, written = file.seek(0, os.SEEK_END), 0
    try:
        while written < len(data):
            written += file.write(data[written:])
    except OSError:
        file.truncate(end)
        raise

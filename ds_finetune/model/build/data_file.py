"""A file that several threads read at any offset."""

import os
import weakref
from functools import cached_property
from pathlib import Path


class DataFile:
    """Opened at the first read, closed with the object."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _descriptor(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes from `offset`; EOFError where the file is too short."""
        while view:
            num_read = os.preadv(self._descriptor, [view], offset)
            if not num_read:
                raise EOFError(f"{self.path} ends at byte {offset}, {len(view)} bytes early")
            view, offset = view[num_read:], offset + num_read

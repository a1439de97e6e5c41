"""Folders on disks: what they hold, and where they would be made."""

import os
import stat
from contextlib import suppress
from pathlib import Path


def bytes_below(folder: Path) -> int:
    """Bytes of the regular files in a folder and below it; files that vanish meanwhile do not count."""
    total = 0
    # Another process may remove a folder or a file meanwhile; os.walk passes over folders that are gone, rglob raises.
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = Path(parent, name).lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def nearest_existing(folder: Path) -> Path:
    """`folder`, or the nearest above it that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())

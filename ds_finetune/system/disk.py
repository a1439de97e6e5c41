"""Size of a folder, and the nearest existing parent of a folder that is to be created."""

import os
import stat
from contextlib import suppress
from pathlib import Path


def bytes_below(folder: Path) -> int:
    """Total bytes of the regular files in a folder, recursively; files that vanish meanwhile do not count."""
    total = 0
    # Another process may remove folders meanwhile: os.walk skips them, while rglob would raise.
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = Path(parent, name).lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def nearest_existing(folder: Path) -> Path:
    """`folder` itself, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())

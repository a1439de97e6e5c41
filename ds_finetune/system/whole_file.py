"""Atomic replacement of files: written under another name, then renamed, so that no reader sees an incomplete file."""

import errno
import os
from pathlib import Path


def replace_file(path: Path, content: str | bytes, *, is_synced: bool = False) -> None:
    """Write `content` (a str is encoded as UTF-8) to `path` atomically; raises OSError.

    After a power failure the content may be lost unless `is_synced`, which flushes it to disk before the rename.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        if is_synced:
            synchronise(partial)
        partial.replace(path)
        if is_synced:
            synchronise(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def synchronise_names(folder: Path) -> None:
    """Flush the directory entries of `folder`, and of its parents on the same file system, to disk."""
    above = folder.absolute()
    while above.parent != above and above.parent.stat().st_dev == above.stat().st_dev:
        above = above.parent
        # A folder that cannot be read was not created by this process.
        if os.access(above, os.R_OK):
            synchronise(above)


def synchronise(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk, so that they survive a power failure (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as refused:
        if refused.errno != errno.EINVAL:
            raise
        raise OSError(
            errno.EINVAL, f"its file system refuses fsync of {path}, without which files may be lost"
        ) from refused
    finally:
        os.close(descriptor)

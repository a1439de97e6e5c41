"""Replaces files atomically: a file is written under another name, then renamed. No reader sees a partial file."""

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
    """Flush the directory entries of each parent of `folder` to disk, up to the root of its file system."""
    above = folder.absolute()
    while above.parent != above and above.parent.stat().st_dev == above.stat().st_dev:
        above = above.parent
        # Only folders that can be read are flushed: this process has not created the others.
        if os.access(above, os.R_OK):
            synchronise(above)


def synchronise(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk (fsync), so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as refused:
        if refused.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
        raise OSError(
            refused.errno, f"its file system refuses fsync of {path}, without which files may be lost"
        ) from refused
    finally:
        os.close(descriptor)

"""Files that appear whole: written under another name, then renamed, so that no reader sees a part of one."""

import errno
import os
from pathlib import Path


def replace_file(path: Path, content: str | bytes, *, is_synced: bool = False) -> None:
    """Write `content` (a text in UTF-8) to `path`, whole or not at all; OSError as files.

    It may be lost in a power failure, unless `is_synced`: then the disk has the content before the file has its name.
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
    """Flush the name of `folder`, and the names of the folders above it on the same file system, to the disk."""
    above = folder.absolute()
    while above.parent != above and above.parent.stat().st_dev == above.stat().st_dev:
        above = above.parent
        # A folder that may not be read holds a name that this process did not make.
        if os.access(above, os.R_OK):
            synchronise(above)


def synchronise(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk, so that they survive a power failure (fsync)."""
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

"""Files that appear whole: written under another name, then renamed, so that no reader sees a part of one."""

import os
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Write `content` (a text in UTF-8) to `path`, whole or not at all; OSError as files.

    It may be lost in a power failure, unless `synchronise` follows.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def synchronise(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk, so that they survive a power failure (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

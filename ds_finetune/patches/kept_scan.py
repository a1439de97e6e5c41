"""What transformers finds when it reads the source of all its models for their names, kept on disk between starts.

transformers 5.23 reads 2,500 files at every import (utils/import_utils.py:3163), 0.2 s of CPU. Asking for their sizes
and times takes a tenth of that.
"""

import hashlib
import marshal
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_finetune.whole_file import replace_file

Structure = dict[Any, Any]
"""Names by module and by what they require; subfolders by their name."""


def scan_or_read(scan: Callable[[str], Structure], folder: Path, *, also: Path) -> Structure:
    """`scan(folder)`, or what it was when no file of `folder` and not the file `also` had another size or time.

    A file that cannot be written is done without.
    """
    # marshal's format belongs to one version of Python, and so do the names of its sets.
    state = (sys.version, _state(also.parent, [also.name]), _states(folder))
    file = _kept_file(folder)
    found = _read(file, state)
    if found is None:
        found = scan(str(folder))
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, marshal.dumps((state, found)))
    return found


def _states(folder: Path) -> str:
    """A digest of the names, sizes and times of all files below a folder."""
    lines = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        lines.append(_state(Path(parent), sorted(files)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _state(folder: Path, names: list[str]) -> str:
    parent = str(folder)
    found = [os.stat(f"{parent}/{name}") for name in names]  # noqa: PTH116 - thousands of paths take longer
    return repr((parent, [(name, each.st_size, each.st_mtime_ns) for name, each in zip(names, found, strict=True)]))


def _kept_file(folder: Path) -> Path:
    key = hashlib.sha256(f"{folder} {sys.version}".encode()).hexdigest()[:16]
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - fails for no user
    return Path(caches) / "ds_finetune" / "model_names" / key


def _read(file: Path, state: object) -> Structure | None:
    # Like Python's own caches, it is a file that only this user writes.
    try:
        kept, found = marshal.loads(file.read_bytes())
    except (OSError, ValueError, TypeError, EOFError):
        return None
    return found if kept == state and isinstance(found, dict) else None

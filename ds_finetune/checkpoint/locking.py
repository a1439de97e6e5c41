"""Locks a checkpoint folder for one run until all processes of the run have exited, including its writer processes."""

import fcntl
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ds_finetune.console.phase_line import Say
from ds_finetune.errors import OutputError

LOCK = ".lock"
LOCK_SECONDS = 60.0
"""Seconds to wait for the end of another run that has locked the checkpoint folder."""
DEAD_SECONDS = 1800.0
"""Seconds to wait for the writer processes of an ended run to complete its last checkpoint."""
_POLL_SECONDS = 0.05


def lock_folder(folder: Path, *, seconds: float, say: Say) -> TextIO:
    """Lock a checkpoint folder against other runs, until the returned file is closed or this process exits. Waits
    `seconds` for a run that has the lock, or DEAD_SECONDS if only its writer process is alive; then OutputError.
    """
    began, is_announced = time.monotonic(), False
    while True:
        file = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            file.seek(0)
            holder = file.read()
            file.close()
            owner = re.fullmatch(r"process (\d+) on (.*)", holder)
            is_dead = owner and owner[2] == socket.gethostname() and not Path(f"/proc/{owner[1]}").exists()
            if time.monotonic() - began > (DEAD_SECONDS if is_dead else seconds):
                raise OutputError(
                    f"{folder} is in use by another run ({holder})", hint="end that run, or name another output_dir"
                ) from taken
            if not is_announced:
                say(f"{folder} is still being written by {holder}; waiting")
            is_announced = True
            time.sleep(_POLL_SECONDS)
            continue
        except OSError as refused:
            say(f"{folder} cannot be locked ({refused}): make sure that no other run writes to it")
        if os.fstat(file.fileno()).st_nlink:
            # The lock file names its owner, for messages of waiting runs. If the disk is full, the file stays empty.
            with suppress(OSError):
                file.truncate(0)
                file.write(_owner())
                file.flush()
            return file
        # The lock file was removed after it was opened. Other runs would not see a lock on it, so try again.
        file.close()


def remove_own_lock(folder: Path) -> None:
    """Remove the lock file if this process has the lock."""
    with suppress(OSError):
        if (folder / LOCK).read_text(encoding="utf-8") == _owner():
            (folder / LOCK).unlink()


def _owner() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"

"""Files of one rank of a launched run: its log, and the file in which it leaves its error for torch's elastic agent."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ds_finetune.system.whole_file import replace_file

RUN_ID = "DS_FINETUNE_RUN_ID"
"""Environment variable of every rank with the id of the run, which is also the name of the run's log folder."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable in which torch's elastic agent names a rank's error file."""


def logs_folder(output_dir: str, run_id: str) -> Path:
    """Folder of the logs of a run's ranks, on each host."""
    return Path(output_dir) / "logs" / run_id


def log_name(rank: int) -> str:
    """File name of a rank's log."""
    return f"rank-{rank:05d}.log"


def record_error(text: str, *, cause: str = "", file: str = "") -> None:
    """Write the error with which a rank ends. Nothing is written if the file has an error already, or if no agent has
    named a file.

    `cause` is the error of another rank if this rank ends only because of it. `file` is the file to write: this
    process's own error file by default, or that of a rank which this process is about to kill. The format is that of
    torch 2.13 (elastic/multiprocessing/errors/error_handler.py:80). `at` is exact, while `timestamp` has whole seconds.
    """
    path = Path(file or os.environ.get(ERROR_FILE, ""))
    if path == Path() or path.exists():
        return
    now = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now))}
    message = {"message": text, "extraInfo": extra, "at": now, "cause": cause}
    # The file is replaced atomically: torch's agent fails on an incomplete file, which a full disk would leave.
    with suppress(OSError):
        replace_file(path, json.dumps({"message": message}))

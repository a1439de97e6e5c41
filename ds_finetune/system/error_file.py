"""The file in which a rank leaves its error for torch's elastic agent, which starts the ranks of a host."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ds_finetune.system.whole_file import replace_file

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable in which torch's elastic agent names a rank's error file."""


def record_error(text: str, *, cause: str = "", file: str = "") -> None:
    """Write the error with which a rank ends, unless an earlier one is recorded or no agent has named a file.

    `cause` says why the run ends, for a rank that only ends because of another one. `file` is the error file of another
    rank that this process is about to kill; by default it is this process's own. The format is that of torch 2.13
    (elastic/multiprocessing/errors/error_handler.py:80). Its key `at` is more exact than the agent's timestamp
    in seconds.
    """
    path = Path(file or os.environ.get(ERROR_FILE, ""))
    if path == Path() or path.exists():
        return
    now = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now))}
    message = {"message": text, "extraInfo": extra, "at": now, "cause": cause}
    # The file is replaced atomically: the agent fails on an incomplete file, which a full disk would leave.
    with suppress(OSError):
        replace_file(path, json.dumps({"message": message}))

"""The file in which a rank leaves its error for torch's elastic agent, under `launch` and under plain torchrun."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ds_finetune.system.whole_file import replace_file


def record_error(text: str) -> None:
    """Write the error with which this process ends; nothing happens where no agent asks for it.

    The format is that of torch 2.13 (elastic/multiprocessing/errors/error_handler.py:80). `at` is more exact than the
    agent's timestamp in seconds.
    """
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    now = time.time()
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(now))}, "at": now}
    # The agent fails at a part of a file, as a full disk leaves it.
    with suppress(OSError):
        replace_file(Path(path), json.dumps({"message": message}))

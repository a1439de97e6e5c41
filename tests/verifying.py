"""Exports are verified by forks of a process that has imported transformers, and nothing of the package, before.

The process that verifies takes 4 s to import transformers, and some thirty tests start one. The process that tries a
micro-batch is a fork of the ranks' server, where its address is in the environment.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.forks import ADDRESSES, PARENT
from tests.launched import SOCKET

ADDRESS = ADDRESSES[True]
"""In the environment. Without it processes are started as the package starts them."""
_LAUNCHED = str(Path(__file__).with_name("launched.py"))
_TRIAL = ["-m", "ds_finetune.trainer.trial_process"]
_TRIAL_FILE = Path(__file__).parents[1] / "ds_finetune" / "trainer" / "trial_process.py"
_start = subprocess.Popen.__init__


def _start_or_fork(self: Any, args: Any, *others: Any, **options: Any) -> None:
    address = os.environ.get(ADDRESS)
    is_verifying = isinstance(args, list) and len(args) > 3 and args[2].endswith("plain_transformers.py")
    if address and is_verifying:
        args = [sys.executable, _LAUNCHED, args[2], PARENT, *args[4:]]
        options["env"] = {**options["env"], SOCKET: address}
    elif SOCKET in os.environ and isinstance(args, list) and args[1:3] == _TRIAL:
        args = [sys.executable, _LAUNCHED, str(_TRIAL_FILE), PARENT, *args[4:]]
    _start(self, args, *others, **options)


def verify_in_forks() -> None:
    """From now on in this process, and in what is forked from it."""
    subprocess.Popen.__init__ = _start_or_fork  # type: ignore[method-assign]

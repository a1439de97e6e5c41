"""Exports are verified by forks of a process that has imported transformers, and nothing of the package, before.

The process that verifies takes 4 s to import transformers, and some thirty tests start one.
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
_start = subprocess.Popen.__init__


def _start_or_fork(self: Any, args: Any, *others: Any, **options: Any) -> None:
    address = os.environ.get(ADDRESS)
    is_verifying = isinstance(args, list) and len(args) > 3 and args[2].endswith("plain_transformers.py")
    if address and is_verifying:
        args = [sys.executable, _LAUNCHED, args[2], PARENT, *args[4:]]
        options["env"] = {**options["env"], SOCKET: address}
    _start(self, args, *others, **options)


def verify_in_forks() -> None:
    """From now on in this process, and in what is forked from it."""
    subprocess.Popen.__init__ = _start_or_fork  # type: ignore[method-assign]

"""An error of a rank, as it is sent to the other ranks and to the report."""

import traceback

import torch.distributed as dist

from ds_finetune.cluster.watchdog.heartbeats import RunEnding
from ds_finetune.errors import RUN_ERROR_EXIT_CODE, FinetuneError

_MAX_LINES = 50
_MAX_TEXT_CHARACTERS, _MAX_LINE_CHARACTERS = 200_000, 2_000
_PEER_LOST_WORDS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "TCPStore")
"""Words in errors that torch raises when another rank has exited (torch 2.13: RuntimeError from gloo, DistBackendError
from NCCL).
"""


def ending_by(error: BaseException) -> RunEnding:
    """A RunEnding with the first line of `error`, the end of its traceback and its exit code, but no rank at fault."""
    is_framework_error = isinstance(error, FinetuneError)
    lines = (str(error) if is_framework_error else "".join(traceback.format_exception(error))).splitlines()
    code = error.exit_code if isinstance(error, FinetuneError) else RUN_ERROR_EXIT_CODE
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    text = "\n".join(lines[-_MAX_LINES:])[-_MAX_TEXT_CHARACTERS:]
    # A file name that is no UTF-8 cannot be sent as JSON.
    line, text = (each.encode(errors="backslashreplace").decode() for each in (line, text))
    return RunEnding((), f"{type(error).__name__}: {line[:_MAX_LINE_CHARACTERS]}", text, code)


def is_secondary(error: BaseException) -> bool:
    """Whether torch raises `error` on a rank when another rank has exited, so that rank may be the cause."""
    if isinstance(error, FinetuneError):
        return False
    names_peer = isinstance(error, RuntimeError) and any(word in str(error) for word in _PEER_LOST_WORDS)
    return isinstance(error, dist.DistError) or names_peer

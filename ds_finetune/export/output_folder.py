"""Makes output folders. A folder must be new or empty, and gets its name when it is complete."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_finetune.errors import OutputError
from ds_finetune.system.whole_file import synchronise

RECORD = "verification.json"
"""Name of an export's verification record. It is JSON, because vLLM reads every `*.safetensors` file as weights."""
_SHOWN = 5
_PARTIAL = ".ds_finetune-partial"
"""Suffix of an output folder's name while it is incomplete."""


def check_out_empty(out: Path, message: str = "", *, may_hold: Callable[[Path], bool] | None = None) -> None:
    """Raise OutputError if `out` is a file, or a folder with an entry that `may_hold` does not allow. The error begins
    with `message`, or with "OUT is not empty".
    """
    entries = out.iterdir() if out.is_dir() else ()
    names = sorted(entry.name for entry in entries if not (may_hold and may_hold(entry)))
    if names or out.is_file():
        content = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "") if names else "it is a file"
        message = message or f"`{out}` is not empty"
        raise OutputError(f"{message}: {content}", hint="name a new folder, or move the existing one away")


@contextmanager
def replaced_folder(out: Path) -> Iterator[Path]:
    """Context with a new folder to fill, which replaces an older `out` when the context ends without an error.

    Before that its files are flushed to the disk. After an error the new folder is removed. At the start, an incomplete
    folder that a killed program left is removed. OutputError if the folder cannot be made or renamed.
    """
    partial = out.with_name(out.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with as_output_errors(partial):
            partial.mkdir(parents=True)
        yield partial
        with as_output_errors(partial):
            for path in (*partial.rglob("*"), partial):
                synchronise(path)
            shutil.rmtree(out, ignore_errors=True)
            partial.rename(out)
            synchronise(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def as_output_errors(folder: Path) -> Iterator[None]:
    """Context that raises OutputError instead of OSError, e.g. if the disk of `folder` is full."""
    try:
        yield
    except OSError as refused:
        raise OutputError(
            f"`{str(folder).removesuffix(_PARTIAL)}` cannot be written: {refused.strerror}",
            hint="free some space, or name another folder",
        ) from refused

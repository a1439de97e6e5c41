"""Before a run replaces its export, saves the files that a user added to the export or changed in it."""

import filecmp
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from ds_finetune.console.phase_line import Say
from ds_finetune.export.output_folder import RECORD, as_output_errors
from ds_finetune.export.verify.record import UNVERIFIED

CARD = "README.md"
MARK = "<!-- written by ds_finetune"
"""Start of the comment in generated model cards. The comment ends with a checksum of the rest of the card."""
_WEIGHTS = "*model*.safetensors*"
"""Glob pattern of a model's weight files and of their index."""
_TEXTS = (".json", ".jinja", ".md", ".txt", "")


@contextmanager
def kept_edits(out: Path, say: Say) -> Iterator[None]:
    """Context that replaces the export folder `out` by a newer export of the same run.

    Files that a user added or changed in `out` are saved in the folder `OUT-edits`, and named in a message to `say`.
    OutputError if they cannot be saved; `out` is then unchanged.
    """
    if not out.is_dir():
        yield
        return
    names = (f"{out.name}-edits{number}" for number in ("", *map("-{}".format, range(2, 10_000))))
    edits = next(path for path in map(out.with_name, names) if not path.exists())
    with as_output_errors(edits):
        for name in _not_weights(out):
            (edits / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(out / name, edits / name)
            except OSError:
                shutil.copy2(out / name, edits / name)
    try:
        yield
    except BaseException:
        if out.is_dir():
            shutil.rmtree(edits, ignore_errors=True)
        raise
    saved = []
    for file in sorted(path for path in edits.rglob("*") if path.is_file()):
        new = out / file.relative_to(edits)
        if new.is_file() and filecmp.cmp(file, new, shallow=False):
            file.unlink()
        else:
            saved.append(str(file.relative_to(edits)))
    if saved:
        say(f"{out} is replaced; files there that were added or changed are in {edits}: {', '.join(saved)}")
    else:
        shutil.rmtree(edits, ignore_errors=True)


def marked_card(card: str) -> str:
    """Add the checksum of a model card's text to the comment in the card."""
    text = card.encode(errors="backslashreplace")
    mark = f"\\1, checksum {zlib.crc32(text):08x}; an edited card is kept -->"
    return re.sub(f"({MARK} [^ ,]+) -->", mark, text.decode(), count=1)


def is_generated_card(path: Path) -> bool:
    """Whether the model card is exactly as this program wrote it, so that nobody has edited it."""
    text = path.read_bytes().decode(errors="replace")
    return MARK in text and text == marked_card(re.sub(f"({MARK} [^ ,]+),.*", r"\1 -->", text, count=1))


def _not_weights(out: Path) -> Iterator[str]:
    recorded = {}
    with suppress(OSError, ValueError, AttributeError):
        recorded = json.loads((out / RECORD).read_text(encoding="utf-8")).get("files", {})
    for path in (path for path in sorted(out.rglob("*")) if path.is_file()):
        name = path.relative_to(out).as_posix()
        is_weights = fnmatch(name, _WEIGHTS) or (name in recorded and path.suffix not in _TEXTS)
        is_own_card = path.name == CARD and is_generated_card(path)
        if not (is_weights or is_own_card or name in (RECORD, UNVERIFIED)):
            yield name

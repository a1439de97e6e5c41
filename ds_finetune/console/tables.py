"""Prints to the console: tables, lines and errors.

Commands print through `OUT` and `ERR`. Progress lines (`observers/progress.py`, `console/phase_line.py`), the
watchdog's report (`cluster/watchdog/monitor.py`) and helper processes write to standard output or standard error
themselves.
"""

import re
import sys
from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console

from ds_finetune.console.phase_line import CLEAR_LINE

OUT = Console(highlight=False, soft_wrap=True)
LOST: list[OSError] = []
"""Last error with which `show_line` failed to print; empty if it never failed."""
ERR = Console(stderr=True, highlight=False, soft_wrap=True)


def show_pairs(title: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Print `pairs` of names and texts in two columns below a title. Texts are wrapped only on a terminal."""
    rows = list(pairs)
    indent = max((cell_len(name) for name, _ in rows), default=0) + 2
    width = OUT.width - indent if OUT.is_terminal else sys.maxsize
    lines = [title]
    for name, text in rows:
        first, *more_lines = wrapped(text, width)
        lines += [f"{name:{indent}}{first}".rstrip(), *(" " * indent + line for line in more_lines)]
    show_line("\n".join(lines))


def show_note(text: str) -> None:
    """Print a sentence, wrapped on a terminal."""
    show_line("\n".join(wrapped(text, OUT.width if OUT.is_terminal else sys.maxsize)))


def wrapped(text: str, width: int) -> list[str]:
    """Break `text` at spaces into lines of `width`; a word longer than a line, such as a path, at dots and slashes."""
    return [line for paragraph in text.split("\n") for line in _wrapped_line(paragraph, width)]


def _wrapped_line(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        first, *pieces = [word] if cell_len(word) <= width else re.split(r"(?<=[./])(?=\w)", word)
        for piece in (f" {first}" if lines[-1] else first, *pieces):
            if lines[-1] and cell_len(lines[-1] + piece) > width:
                lines.append(piece.removeprefix(" "))
            else:
                lines[-1] += piece
    return lines


def show_line(text: str) -> None:
    """Print a line without markup, replacing a progress line. If the output's disk is full, the run continues."""
    try:
        if OUT.is_terminal:
            OUT.file.write(CLEAR_LINE)
        OUT.print(text, markup=False)
    except OSError as error:
        LOST[:] = [error]


def show_piece(text: str) -> None:
    """Print text without a line end, and flush standard output."""
    OUT.file.write(text)
    OUT.file.flush()


def show_error(text: str) -> None:
    """Print an error to standard error."""
    ERR.print(text, markup=False, style="red")

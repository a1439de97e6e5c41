"""Prints to the console: tables, lines and errors.

Commands print through `OUT` and `ERR`. Progress lines (`observers/progress.py`, `console/phase_line.py`), the
watchdog's report (`cluster/watchdog/monitor.py`) and helper processes write to standard output or standard error
themselves.
"""

from collections.abc import Iterable
from contextlib import suppress

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_finetune.console.phase_line import CLEAR_LINE

OUT = Console(highlight=False, soft_wrap=True)
ERR = Console(stderr=True, highlight=False, soft_wrap=True)


def show_pairs(title: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and texts: as a table that fits a terminal, and elsewhere a line for each, of any length."""
    rows = list(pairs)
    if not OUT.is_terminal:
        width = max((len(name) for name, _ in rows), default=0)
        show_line("\n".join([title, *(f"{name:{width}}  {text}" for name, text in rows)]))
        return
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    with suppress(OSError):
        OUT.print(table)


def show_line(text: str) -> None:
    """Print a line without markup, on a terminal in place of a progress line that is there; a full disk behind standard
    output does not end the run.
    """
    with suppress(OSError):
        if OUT.is_terminal:
            OUT.file.write(CLEAR_LINE)
        OUT.print(text, markup=False)


def show_piece(text: str) -> None:
    """Print a piece of a line without a line end, and flush."""
    OUT.file.write(text)
    OUT.file.flush()


def show_error(text: str) -> None:
    """Print an error."""
    ERR.print(text, markup=False, style="red")

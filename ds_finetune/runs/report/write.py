"""Writes the files of reports: the page of one or more runs, and all reports at the end of a run."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from ds_finetune.console.phase_line import Say
from ds_finetune.errors import OutputError
from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.report.blocks import Page
from ds_finetune.runs.report.model_card import write_model_cards
from ds_finetune.runs.report.page import overlay_page, render_page, run_page
from ds_finetune.runs.status import State
from ds_finetune.system.whole_file import replace_file

REPORT = "report.html"
_MARK = b'<meta name="generator" content="ds_finetune '
_HEAD_BYTES = 1024


def write_run_report(run_folder: Path, *, state: State | None = None) -> Path:
    """Write `report.html` into a run folder, and model cards into its exports; returns the path of the page.

    `state` is the final state of a run that ends with this report; the default is the state in the folder.

    Raises:
        OutputError: the folder holds no run, or the page cannot be written.
    """
    run = RunFolder.read(run_folder)
    path = run_folder / REPORT
    _check_replaceable(path)
    # First the model cards: a failure of other reports must not prevent them.
    write_model_cards(run)
    return write_page(run_page(run, state=state), path)


def write_report(run_folders: Sequence[Path], out: Path) -> Path:
    """Write the page of one run, or of several runs overlaid, to `out`; writes nothing else.

    OutputError where a folder has no run, or `out` is a file other than a report, or cannot be written.
    """
    runs = [RunFolder.read(folder) for folder in run_folders]
    _check_replaceable(out)
    return write_page(run_page(runs[0]) if len(runs) == 1 else overlay_page(runs), out)


def write_page(page: Page, path: Path) -> Path:
    """Write any page, such as that of an experiment; returns `path`.

    OutputError where `path` is a file other than a report, or cannot be written.
    """
    _check_replaceable(path)
    # A text of the run may contain half a surrogate pair, which JSON can represent and UTF-8 cannot.
    html = render_page(page).encode(errors="backslashreplace")
    try:
        replace_file(path, html)
    except OSError as refused:
        raise OutputError(
            f"`{path}` cannot be written: {refused.strerror or refused}", hint="name a file that can be written with -o"
        ) from refused
    return path


def try_run_report(run_folder: Path, say: Say, *, state: State) -> Path | None:
    """Write the report of a run that ends. A failure only prints a line, since the run itself is done."""
    try:
        return write_run_report(run_folder, state=state)
    except Exception as failed:  # noqa: BLE001 - a run that is trained and exported must not fail for its report
        reason = " ".join(str(failed).split()) or type(failed).__name__
        say(f"REPORT NOT WRITTEN: {reason}; `ds-finetune report {shlex.quote(str(run_folder))}` tries again")
        return None


def _check_replaceable(path: Path) -> None:
    """OutputError where `path` is not a report, so that replacing it would lose data."""
    if path.is_dir():
        raise OutputError(f"`{path}` is a folder", hint="name a file such as report.html")
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head and _MARK not in head:
        raise OutputError(f"`{path}` exists and is not a report", hint="name another file, or move that one away")

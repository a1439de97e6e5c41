"""Writes reports: pages of one or several runs, and the page and model cards at the end of a run."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from ds_finetune.console.phase_line import Say
from ds_finetune.errors import OutputError
from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.report.model_card import write_model_cards
from ds_finetune.runs.report.page import Page, render_page
from ds_finetune.runs.report.sections import overlay_page, run_page
from ds_finetune.runs.status import State
from ds_finetune.system.whole_file import replace_file

REPORT = "report.html"
_MARK = b'<meta name="generator" content="ds_finetune '
_HEAD_BYTES = 1024


def write_run_report(run_folder: Path, *, state: State | None = None) -> Path:
    """Write `report.html` into a run folder, and model cards into its exports; returns the path of the page.

    `state` is the final state of a run that ends with this report; the default is the state in the folder. OutputError
    if the folder holds no run, or if the page cannot be written.
    """
    run = RunFolder.read(run_folder)
    _check_replaceable(run_folder / REPORT)
    # The model cards come first, because they need no chart library.
    write_model_cards(run)
    return write_page(run_page(run, state=state), run_folder / REPORT)


def write_report(run_folders: Sequence[Path], out: Path) -> Path:
    """Write the page of one run, or the page that compares several runs, to the file `out`, and nothing else.

    OutputError if a folder holds no run, or if `out` cannot be written or is a file other than a report.
    """
    runs = [RunFolder.read(folder) for folder in run_folders]
    return write_page(run_page(runs[0]) if len(runs) == 1 else overlay_page(runs), out)


def write_page(page: Page, path: Path) -> Path:
    """Write a page to a file; returns the path of the file.

    OutputError if `path` cannot be written, or is a file other than a report.
    """
    _check_replaceable(path)
    # A text of the run may contain half a surrogate pair, which JSON can represent and UTF-8 cannot.
    html = render_page(page).encode(errors="backslashreplace")
    try:
        replace_file(path, html)
    except OSError as refused:
        raise OutputError(
            f"the report `{path}` cannot be written: {refused.strerror or refused}", hint="name another file with -o"
        ) from refused
    return path


def try_run_report(run_folder: Path, say: Say, *, state: State) -> Path | None:
    """Write the report of a run that ends. Errors are only printed: a trained run must not fail for its report."""
    try:
        return write_run_report(run_folder, state=state)
    except Exception as failed:  # noqa: BLE001 - a run that is trained and exported must not fail for its report
        reason = " ".join(str(failed).split()) or type(failed).__name__
        say(f"REPORT NOT WRITTEN: {reason}; `ds-finetune report {shlex.quote(str(run_folder))}` tries again")
        return None


def _check_replaceable(path: Path) -> None:
    """OutputError if `path` exists and is not a report, because writing a page would destroy its content."""
    if path.is_dir():
        raise OutputError(f"the report cannot replace the folder `{path}`", hint="name a file such as report.html")
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head and _MARK not in head:
        raise OutputError(f"the report cannot replace `{path}`, which is not a report", hint="name another file")

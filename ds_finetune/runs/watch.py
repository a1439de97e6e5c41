"""`ds-finetune watch`: serves a table of the runs in a folder, and the page of each run, while they train."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from ds_finetune.console.phase_line import time_text
from ds_finetune.errors import OutputError, ServeError
from ds_finetune.runs.folder import RunFolder, find_runs
from ds_finetune.runs.metrics import METRICS
from ds_finetune.runs.report.page import (
    NONE,
    Block,
    Page,
    PageSection,
    Remark,
    Row,
    Table,
    ago_text,
    number_text,
    render_page,
)
from ds_finetune.runs.report.sections import overlay_page, run_page
from ds_finetune.runs.status import changed_at
from ds_finetune.serving.http_guard import BoundedProtocol, HostCheck, HostRules

MOST_COMPARED = 20
"""Maximum number of runs that are compared, and whose metrics stay in memory (16 MB for a run of 100,000 steps)."""
_TAIL_BYTES = 64 * 1024
"""Number of bytes at the end of a metrics file that are read to find its last record, for the table of runs."""
_HOST = "127.0.0.1"
_SEARCH_SECONDS = 2.0
_CLOSING_SECONDS = 2
_LEVEL = 4
"""Level of gzip compression for pages, most of which are a megabyte of scripts."""
_COLUMNS = ("", "run", "state", "step", "eta", "loss", "tokens/s", "last sign")
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Security headers of each page. A policy in the page itself restricts its scripts."""


def watch(folder: Path, *, port: int, show: Callable[[str], None], allowed_hosts: Sequence[str] = ()) -> None:
    """Serve the pages of the runs in `folder` on this machine's port `port` until SIGINT or SIGTERM; `show` prints a
    line.

    The Host header of a request must be a local name or one of `allowed_hosts`.

    ServeError if `folder` is no folder, or if the port cannot be used.
    """
    if not folder.is_dir():
        raise ServeError(f"`{folder}` is not a folder", hint="name the folder of a run, or a folder with runs below it")
    try:
        listener = socket.create_server((_HOST, port))
    except OSError as refused:
        raise ServeError(
            f"the server cannot listen on {_HOST} port {port}: {refused.strerror or refused}",
            hint="choose another --port, or 0 for any free port",
        ) from refused
    with listener:
        show(f"watching {folder.resolve()}")
        show(f"open http://{_HOST}:{listener.getsockname()[1]}/   (Ctrl-C ends it)")
        config = uvicorn.Config(
            make_app(folder, allowed_hosts),
            http=BoundedProtocol,
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def make_app(folder: Path, allowed_hosts: Sequence[str] = ()) -> HostCheck:
    """Make the web application that serves the runs below `folder`."""
    runs = _Runs(folder)
    routes, gzip = [Route("/", runs.table), Route("/run", runs.page)], Middleware(GZipMiddleware, compresslevel=_LEVEL)
    return HostCheck(Starlette(routes=routes, middleware=[gzip]), HostRules(_HOST, allowed=tuple(allowed_hosts)))


class _Runs:
    """The runs below a folder, and the pages that show them. Requests are answered one at a time, so that no two use
    the same metrics reader.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._runs: dict[str, RunFolder] = {}
        self._searched_at = 0.0
        self._lock = threading.Lock()
        self._with_metrics = lru_cache(MOST_COMPARED)(lambda path: RunFolder(path, within=self._root))

    def table(self, request: Request) -> Response:
        """The page with a table of all runs; running ones come first."""
        with self._lock:
            self._search()
            rows = sorted((_row_of(run) for run in self._runs.values()), key=lambda row: (row[0], -row[1]))
        blocks: list[Block] = [Remark("There is no run in this folder yet. A run appears once its model is loaded.")]
        if rows:
            blocks = [Table("", _COLUMNS, [cells for *_, cells in rows], len(_COLUMNS))]
        subtitle = f"{self._root}: {len(rows):,} runs, of which {sum(not row[0] for row in rows):,} train"
        return _answer(request, Page("Runs", subtitle, "", [], [PageSection("runs", "All runs", blocks)]))

    def page(self, request: Request) -> Response:
        """The page of the run that the request names, or a page that compares several named runs."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 <= len(names) <= MOST_COMPARED:
            raise HTTPException(400, f"{len(names)} runs are named, and 1 to {MOST_COMPARED} are allowed")
        with self._lock:
            runs = [self._read(name) for name in names]
            page = run_page(runs[0], is_live=True) if len(runs) == 1 else overlay_page(runs)
        return _answer(request, page)

    def _read(self, name: str) -> RunFolder:
        self._search()
        if name not in self._runs:
            raise HTTPException(404, f"there is no run {name!r} in {self._root}")
        folder = self._with_metrics(self._runs[name].path)
        folder.problems.clear()
        try:
            folder.update()
        except OutputError as unreadable:
            raise HTTPException(422, str(unreadable)) from unreadable
        return folder

    def _search(self) -> None:
        if time.monotonic() < self._searched_at + _SEARCH_SECONDS:
            return
        self._runs = {run.name: self._runs.get(run.name, run) for run in find_runs(self._root)}
        self._searched_at = time.monotonic()


def _row_of(run: RunFolder) -> tuple[bool, float, Row]:
    """Make the row of a run in the table of runs. Returns two sort keys (False for a running run, and
    the time at which its files last changed) and the cells.
    """
    tick = '<input type="checkbox" name="run" value="{0}" id="tick-{0}" aria-label="Compare {0}">'
    names = (Markup(tick).format(run.name), Markup('<a href="/run?run={}">{}</a>').format(quote(run.name), run.name))
    try:
        status, last = run.status, (run.records(METRICS, _TAIL_BYTES) or [{}])[-1]
        numbers = {name: float(value) for name, value in last.items() if isinstance(value, int | float)}
        step, steps = max(status.step, last.get("step", 0)), status.steps or run.last_start.get("steps", 0)
        eta = numbers.get("perf/eta_seconds") if status.state == "running" else None
        updated_at = max(status.updated_at, changed_at(run.path / METRICS))
        cells = (
            Markup("{} <small>{}</small>").format(status.state, status.reason if status.state != "unknown" else ""),
            f"{step:,} of {steps:,}" if steps else f"{step:,}",
            NONE if eta is None else time_text(eta),
            number_text(numbers.get("train/loss")),
            number_text(numbers.get("perf/tokens_per_second")),
            ago_text(updated_at),
        )
    except Exception as error:  # noqa: BLE001 - an unreadable run must not remove other runs from the table
        return True, 0.0, (*names, f"unknown; the folder cannot be read: {type(error).__name__}", *[NONE] * 5)
    return status.state != "running", updated_at, (*names, *cells)


def _answer(request: Request, page: Page) -> Response:
    """Answer a request with `page` as HTML. An open page, which has the chart library, asks with `library=no`, and
    the answer is then without the library.
    """
    html = render_page(page, is_live=True, has_library=request.query_params.get("library") != "no")
    # Texts of a run may contain half a surrogate pair, which UTF-8 cannot represent.
    return HTMLResponse(html.encode(errors="backslashreplace"), headers=_HEADERS)

"""`ds-finetune watch`: serves a table of the runs in a folder, and the page of each run, while they train."""

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds_finetune.console.phase_line import time_text
from ds_finetune.errors import OutputError, ServeError
from ds_finetune.runs.folder import MOST_RUNS, RunFolder, find_runs
from ds_finetune.runs.metrics import METRICS, last_record
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
from ds_finetune.serving.http_guard import BoundedProtocol, HostRules, foreign_host, is_loopback

MOST_COMPARED = 20
"""Maximum number of runs that are compared, and whose metrics are in memory: 16 MB for a run of 100,000 steps."""
_SEARCH_SECONDS = 2.0
_CLOSING_SECONDS = 2
_LEVEL = 4
"""Level of gzip for pages, which have a megabyte of scripts."""
COOKIE = "ds_finetune_watch"
_COLUMNS = ("", "run", "state", "step", "eta", "loss", "tokens/s", "last sign")
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of each answer. What scripts may do is in the policy of the page itself."""


@dataclass(frozen=True)
class AccessRules(HostRules):
    """The hosts that requests may name, and the access token, which is empty if only this machine can connect."""

    token: str = ""

    def has_token(self, token: str) -> bool:
        """Whether `token` is the access token."""
        return hmac.compare_digest(token.encode(), self.token.encode())


class AccessCheck:
    """Refuses requests that the rules do not allow, before the application gets them.

    The address that is printed contains the token (`?token=`). The first response stores it in a cookie and redirects
    to the address without it, so that it stays neither in the address bar nor in the history.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refusal(Request(scope)) or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> ASGIApp | None:
        if not self._rules.allows(request.headers):
            return foreign_host()
        if not self._rules.token or self._rules.has_token(request.cookies.get(COOKIE, "")):
            return None
        if not self._rules.has_token(request.query_params.get("token", "")):
            text = "The page needs its token: open the address that `ds-finetune watch` has printed.\n"
            return PlainTextResponse(text, status_code=401)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(COOKIE, self._rules.token, httponly=True, samesite="strict")
        return answer


def watch(
    folder: Path, *, host: str, port: int, show: Callable[[str], None], allowed_hosts: Sequence[str] = ()
) -> None:
    """Serve the pages of the runs in `folder` until SIGINT or SIGTERM; `show` prints a line.

    Requests may name the server by `host`, by the names of this machine, and by `allowed_hosts`.

    ServeError if `folder` is no folder, or if the address cannot be used.
    """
    if not folder.is_dir():
        raise ServeError(f"`{folder}` is not a folder", hint="name the folder of a run, or one with runs below it")
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    rules = AccessRules(host, token, allowed=tuple(allowed_hosts))
    with _listen(host, port) as listener:
        show(f"watching {folder.resolve()}")
        show(f"open {_url(rules, listener.getsockname()[1])}   (Ctrl-C ends it)")
        if rules.token:
            show("other machines reach this page: whoever has this address can read the runs")
        config = uvicorn.Config(
            make_app(folder, rules),
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


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family)
    except OSError as refused:
        raise ServeError(
            f"cannot listen on {host} port {port}: {refused.strerror or refused}",
            hint="give another --port (0 takes a free one) or --host",
        ) from refused


def _url(rules: AccessRules, port: int) -> str:
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(rules.host, rules.host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    return f"{address}?token={rules.token}" if rules.token else address


def make_app(folder: Path, rules: AccessRules) -> AccessCheck:
    """The application that serves the runs of `folder`."""
    runs = _Runs(folder)
    routes, gzip = [Route("/", runs.table), Route("/run", runs.page)], Middleware(GZipMiddleware, compresslevel=_LEVEL)
    return AccessCheck(Starlette(routes=routes, middleware=[gzip]), rules)


class _Runs:
    """The runs below a folder. Requests are answered one at a time, so that each metrics reader has one user."""

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
        """The page of one run, or of several runs compared."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 <= len(names) <= MOST_COMPARED:
            raise HTTPException(400, f"{len(names)} runs are named, and 1 to {MOST_COMPARED} are allowed")
        with self._lock:
            runs = [self._read(name) for name in names]
            page = run_page(runs[0], is_live=True) if len(runs) == 1 else overlay_page(runs)
        return _answer(request, page)

    def _read(self, name: str) -> RunFolder:
        """The run `name` with its metrics read."""
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
        """Search the folder for new and removed runs, at most every two seconds."""
        if time.monotonic() < self._searched_at + _SEARCH_SECONDS:
            return
        self._runs = {run.name: self._runs.get(run.name, run) for run in find_runs(self._root)}
        self._searched_at = time.monotonic()


def _row_of(run: RunFolder) -> tuple[bool, float, Row]:
    """Whether a run does not train, the time of its last sign of life, and the cells of its row in the table."""
    tick = '<input type="checkbox" name="run" value="{0}" id="tick-{0}" aria-label="Compare {0}">'
    names = (Markup(tick).format(run.name), Markup('<a href="/run?run={}">{}</a>').format(quote(run.name), run.name))
    try:
        status, path = run.status, run.file(METRICS)
        stat = None if path is None else path.stat()
        last = {} if path is None or stat is None else _last_record(path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))
        numbers = {name: float(value) for name, value in last.items() if isinstance(value, int | float)}
        step, steps = max(status.step, last.get("step", 0)), status.steps or run.last_start.get("steps", 0)
        eta = numbers.get("perf/eta_seconds") if status.state == "running" else None
        updated_at = max(status.updated_at, stat.st_mtime if stat else 0.0)
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


@lru_cache(maxsize=2 * MOST_RUNS)
def _last_record(path: Path, _version: object) -> Mapping[str, Any]:
    """The last record of a metrics file, read once for each version of the file."""
    return last_record(path)


def _answer(request: Request, page: Page) -> Response:
    """The page as HTML; `library=no` in the address leaves out the chart library, which the browser already has."""
    html = render_page(page, is_live=True, has_library=request.query_params.get("library") != "no")
    # Texts of a run may contain half a surrogate pair, which UTF-8 cannot represent.
    return HTMLResponse(html.encode(errors="backslashreplace"))

"""The server behind the page: static files, the runs as JSON, a stream of what changes, and who may read them."""

import asyncio
import hmac
import json
import math
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds_finetune.errors import ServeError
from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.report.charts import PLOTS, bokehjs
from ds_finetune.runs.watch.store import MOST_COMPARED, RunStore, Tree
from ds_finetune.serving.http_guard import BoundedProtocol, HostRules, foreign_host, is_loopback

STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POINTS, _LEAST_POINTS, _MOST_POINTS = 800, 16, 4_000
_LOOK_SECONDS = 0.4
"""How often a stream looks for new steps."""
_ROWS_SECONDS = 1.0
"""How often a stream looks for changes of the list."""
_SILENT_SECONDS = 15.0
"""A stream without news sends an empty comment this often, so that a connection that is gone is noticed."""
MOST_STREAMS = 64
"""Open streams at most: each holds a connection, and http_guard.CONNECTIONS bounds those. A new one ends the oldest."""
_CLOSING_SECONDS = 2
COOKIE = "ds_finetune_watch"
_HEADERS = {
    "Content-Security-Policy": (
        # BokehJS puts style elements into its charts.
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True)
class AccessRules(HostRules):
    """Hosts that are allowed, and the token, which is empty where only this machine reaches the page."""

    token: str = ""

    def has_token(self, given: str) -> bool:
        """Whether a text is the token."""
        return hmac.compare_digest(given.encode(), self.token.encode())


class AccessCheck:
    """Refuses requests that the rules do not allow, before the application sees them.

    The token comes once in the address (`?token=`). The answer puts it into a cookie and leads to the address without
    it, so that it stays neither in the address bar nor in the history.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return

        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refusal(Request(scope)) or self._app)(scope, receive, send_confined)

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
    """Serve the page over the runs in `folder` until SIGINT or SIGTERM; `show` prints a line.

    Requests may name the server by `host`, by the names of this machine, and by `allowed_hosts`.

    ServeError where `folder` is no folder, or the address cannot be used.
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
            make_app(RunStore(folder), rules, lambda: server.should_exit),
            http=BoundedProtocol,
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        server = uvicorn.Server(config)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


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
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(rules.host, rules.host)
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
    return f"{address}?token={rules.token}" if rules.token else address


def make_app(store: RunStore, rules: AccessRules, is_closing: Callable[[], bool] = lambda: False) -> AccessCheck:
    """The application over the runs of `store`; its streams end once `is_closing` is true.

    Raises:
        DependencyError: the chart library is not installed.
    """
    watcher = _Watcher(store, is_closing)
    files = {path.name: path for path in (*STATIC.iterdir(), PLOTS, bokehjs())}

    async def static_file(request: Request) -> Response:
        path = files.get(request.path_params.get("name", "index.html"))
        if path is None:
            raise HTTPException(404)
        # The browser asks each time whether the file has changed, so that an upgrade is seen at once.
        headers = {"Cache-Control": "no-cache"}
        return FileResponse(path, media_type=_TYPES[path.suffix], headers=headers)

    routes = [
        Route("/", static_file),
        Route("/static/{name}", static_file),
        Route("/api/runs", watcher.runs),
        Route("/api/run", watcher.run),
        Route("/api/curves", watcher.curves),
        Route("/api/stream", watcher.stream),
    ]
    return AccessCheck(Starlette(routes=routes), rules)


class _Watcher:
    """The routes over the runs."""

    def __init__(self, store: RunStore, is_closing: Callable[[], bool]) -> None:
        self._store, self._is_closing = store, is_closing
        self._streams: list[object] = []

    async def runs(self, _: Request) -> Response:
        """The list of runs."""
        rows = await run_in_threadpool(self._store.rows)
        return _json({"folder": str(self._store.root), "runs": rows, "most_compared": MOST_COMPARED})

    async def run(self, request: Request) -> Response:
        """One run without its curves."""
        (run,) = await self._runs_of(request, most=1)
        details = await run_in_threadpool(self._store.details, run)
        times = await run_in_threadpool(self._store.rank_times, run, _POINTS // 4)
        return _json({**details, "rank_times": times})

    async def curves(self, request: Request) -> Response:
        """The curves of runs, each with at most `points` points."""
        runs, most = await self._runs_of(request), _points(request)
        readers = {run.name: self._store.reader(run) for run in runs}
        return _json({name: await run_in_threadpool(reader.curves, most) for name, reader in readers.items()})

    async def stream(self, request: Request) -> Response:
        """Server-sent events: `runs` with the rows of the list that changed, `points` with new points of some runs."""
        runs = await self._runs_of(request, least=0)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(runs), media_type="text/event-stream", headers=headers)

    async def _events(self, runs: list[RunFolder]) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        positions: dict[str, Tree] = {}
        sent: dict[str, Tree] = {}
        rows_at = heard_at = -_SILENT_SECONDS
        stream = object()
        self._streams = [*self._streams, stream][-MOST_STREAMS:]
        while stream in self._streams and not self._is_closing():
            events = []
            for run in runs:
                added = await run_in_threadpool(self._store.reader(run).since, positions.get(run.name))
                if added is not None:
                    positions[run.name] = added["position"]
                    events.append(_event("points", {"run": run.name, **added}))
            if loop.time() > rows_at + _ROWS_SECONDS:
                rows_at = loop.time()
                rows = {row["name"]: row for row in await run_in_threadpool(self._store.rows)}
                changed = [row for name, row in rows.items() if sent.get(name) != row]
                if changed or rows.keys() != sent.keys():
                    sent = rows
                    events.append(_event("runs", {"changed": changed, "names": list(rows)}))
            if events or loop.time() > heard_at + _SILENT_SECONDS:
                heard_at = loop.time()
                yield "".join(events) or ": nothing new\n\n"
            await asyncio.sleep(_LOOK_SECONDS)

    async def _runs_of(self, request: Request, *, least: int = 1, most: int = MOST_COMPARED) -> list[RunFolder]:
        """The runs that a request names; only names of runs that were found below the folder lead anywhere."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not least <= len(names) <= most:
            raise HTTPException(400, f"{len(names)} runs are named, and {least} to {most} are allowed")
        runs = [(name, await run_in_threadpool(self._store.find, name)) for name in names]
        missing = [name for name, run in runs if run is None]
        if missing:
            raise HTTPException(404, f"there is no run {missing[0]!r} in the folder")
        return [run for _, run in runs if run is not None]


def _points(request: Request) -> int:
    text = request.query_params.get("points", str(_POINTS))
    if not text.isascii() or not text.isdigit() or len(text) > len(str(_MOST_POINTS)):
        raise HTTPException(400, f"points is {text!r}, and {_LEAST_POINTS} to {_MOST_POINTS} are allowed")
    return min(max(int(text), _LEAST_POINTS), _MOST_POINTS)


def _json(tree: Tree) -> Response:
    return Response(_text(tree), media_type="application/json", headers={"Cache-Control": "no-store"})


def _event(name: str, tree: Any) -> str:  # noqa: ANN401 - any JSON value
    return f"event: {name}\ndata: {_text(tree)}\n\n"


def _text(tree: Any) -> str:  # noqa: ANN401 - any JSON value
    """JSON in ASCII, as names of folders need not be UTF-8; null for numbers that are not finite."""
    try:
        return json.dumps(tree, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(tree), allow_nan=False)


def _finite(tree: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(tree, dict):
        return {name: _finite(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree

"""The application behind the page: static files, the runs as JSON, and a stream of what changes."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.report.library import PLOTS, bokehjs
from ds_finetune.runs.watch.access import AccessCheck, AccessRules
from ds_finetune.runs.watch.store import MOST_COMPARED, RunStore, Tree

STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POINTS, _LEAST_POINTS, _MOST_POINTS = 800, 16, 4_000
_LOOK_SECONDS = 0.4
"""How often a stream looks for new steps."""
_ROWS_SECONDS = 1.0
"""How often a stream looks for changes of the list."""
_SILENT_SECONDS = 15.0
"""A stream without news sends an empty comment this often, so that a connection that is gone is noticed."""


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
        while not self._is_closing():
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

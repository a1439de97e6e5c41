"""Listens for the page and serves it until Ctrl-C."""

import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn

from ds_finetune.errors import ServeError
from ds_finetune.runs.watch.access import AccessRules
from ds_finetune.runs.watch.app import make_app
from ds_finetune.runs.watch.store import RunStore
from ds_finetune.serving.http_guard import BoundedProtocol, is_loopback

_CLOSING_SECONDS = 2


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
        server = uvicorn.Server(_server_config(folder, rules, lambda: server.should_exit))
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def _server_config(folder: Path, rules: AccessRules, is_closing: Callable[[], bool]) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(RunStore(folder), rules, is_closing),
        http=BoundedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )


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

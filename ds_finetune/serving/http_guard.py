"""Protects all HTTP servers of this program.

Requests with foreign Host and Origin headers are refused, and connections that send no complete request, or read no
response, are closed.
"""

import asyncio
import ipaddress
import socket
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVE_SECONDS = 30.0
"""Seconds for a request to arrive, and for a client to read a piece of a response; then the connection is closed."""
CONNECTIONS = 256
"""Maximum number of open connections of a server; a process may usually open 1,024 files."""
REQUESTS = 192
"""Maximum number of requests answered or queued at a time; CONNECTIONS leaves room to refuse further ones."""
_OWN_NAMES = ("localhost", "127.0.0.1", "::1")
_REFUSED = (
    "The Host or Origin header names another server. If the name is right, start the server with --allow-host NAME.\n"
)


def is_loopback(host: str) -> bool:
    """Whether an address given as `--host` can be reached only from this machine."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


@dataclass(frozen=True)
class HostRules:
    """Host names that requests may use for a server that listens on `host`."""

    host: str
    allowed: tuple[str, ...] = field(default=(), kw_only=True)
    """Further host names that requests may use, such as those of a proxy or cluster; `*` allows every name."""
    own_names: frozenset[str] = field(init=False)
    """Host names of this server. They are looked up once, since a look-up takes seconds if no DNS server answers."""

    def __post_init__(self) -> None:
        names = {*_OWN_NAMES, self.host.lower(), *(name.lower() for name in self.allowed)}
        if not is_loopback(self.host):
            names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        object.__setattr__(self, "own_names", frozenset(names - {""}))

    def allows(self, headers: Headers) -> bool:
        """Whether the Host header of a request names this server, and so does its Origin header, if there is one.

        With DNS rebinding, the host name of another site resolves to this machine, and its pages send this name as
        Host. Numeric addresses cannot be rebound, so they are allowed if the server listens for other machines. A
        page of another site that posts to this server sends the name of its own site as Origin.
        """
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return False
        name, is_open = _name_of(hosts[0]), "*" in self.allowed
        origins = {_name_of(origin.partition("://")[2]) for origin in headers.getlist("origin")}
        if not is_open and origins - self.own_names - {name}:
            return False
        return name in self.own_names or is_open or (_address(name) is not None and not is_loopback(self.host))


class HostCheck:
    """Refuses requests whose Host or Origin header the rules do not allow, before the application sees them."""

    def __init__(self, app: ASGIApp, rules: HostRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or refuse it because of its Host or Origin header."""
        is_refused = scope["type"] == "http" and not self._rules.allows(Headers(scope=scope))
        await (PlainTextResponse(_REFUSED, status_code=421) if is_refused else self._app)(scope, receive, send)


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with time limits for a request to arrive and for a response to be read, and limits of
    requests and open connections.

    uvicorn 0.54 limits only the time between two requests (`timeout_keep_alive`), and counts connections when a request
    is complete (h11_impl.py:250). Beyond `CONNECTIONS` connections, the one that has waited longest without a complete
    request is closed. Requests beyond `REQUESTS` are refused with status 503.
    """

    _waits_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for a request of a new connection, and close a connection if there are too many."""
        super().connection_made(transport)
        self.app = self._answer_or_refuse  # type: ignore[assignment]
        self._await_request()
        if len(self.connections) > CONNECTIONS:
            waiting = [other for other in self._all_connections() if other._is_waiting]
            min(waiting, key=lambda other: other._waits_since)._close()

    def on_response_complete(self) -> None:
        """Start the time limit for the next request of a connection."""
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        """Start the time limit for a client to read some of its response, because much of it waits to be sent."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """Stop the time limit, because the client has read what waited to be sent."""
        super().resume_writing()
        self._unread.cancel()

    def _await_reading(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(RECEIVE_SECONDS, self._close_if_unread, size)

    def _close_if_unread(self, size: int) -> None:
        if self.transport.get_write_buffer_size() < size:
            self._await_reading()
        else:
            self._close()

    async def _answer_or_refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if sum(not connection._is_waiting for connection in self._all_connections()) <= REQUESTS:
            return await self.config.loaded_app(scope, receive, send)  # type: ignore[no-any-return]
        text = f"The server is busy with {REQUESTS} requests, as many as it can have: send the request again later.\n"
        busy = PlainTextResponse(text, status_code=503, headers={"Retry-After": "10", "Connection": "close"})
        await busy(scope, receive, send)

    def _all_connections(self) -> "list[BoundedProtocol]":
        return [connection for connection in self.connections if isinstance(connection, BoundedProtocol)]

    @property
    def _is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _await_request(self) -> None:
        self._waits_since = self.loop.time()
        unread = self.transport.get_write_buffer_size()
        self.loop.call_later(RECEIVE_SECONDS, self._close_if_late, self._waits_since, unread)

    def _close_if_late(self, waits_since: float, unread: int) -> None:
        if not self._is_waiting or self._waits_since != waits_since:
            return
        if self.transport.get_write_buffer_size() < unread:
            self._await_request()
        else:
            self._close()

    def _close(self) -> None:
        self.connections.discard(self)
        self.transport.abort()


def _name_of(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].rstrip(".").lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None

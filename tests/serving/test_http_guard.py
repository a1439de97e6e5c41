"""Servers under clients that send half a request, too many connections, or the name of another server."""

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ds_finetune.serving import http_guard
from ds_finetune.serving.http_guard import BoundedProtocol, HostCheck, HostRules

PATIENCE_SECONDS = 30
HALF = b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: "


async def _length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


async def _endless(_: Request) -> StreamingResponse:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"a" * 2**16
            await asyncio.sleep(0.05)

    return StreamingResponse(pieces())


async def _large(_: Request) -> PlainTextResponse:
    return PlainTextResponse("a" * 2**24)


APP = Starlette(
    routes=[Route("/", _length, methods=["GET", "POST"]), Route("/endless", _endless), Route("/large", _large)]
)


SERVERS: dict[int, uvicorn.Server] = {}


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            APP, http=BoundedProtocol, ws="none", lifespan="off", log_level="error", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    SERVERS[listener.getsockname()[1]] = server
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(PATIENCE_SECONDS)


def _opened(port: int, begin: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
    client.sendall(begin)
    return client


def _answer(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    connection.request("POST", "/", body="abc")
    return connection.getresponse().read().decode()


def _is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def _drip(client: socket.socket, until: float) -> None:
    while time.monotonic() < until:
        client.sendall(b"a")
        time.sleep(0.02)


@pytest.mark.parametrize("begin", [b"", HALF, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc"])
def test_half_a_request_is_closed(port: int, begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "RECEIVE_SECONDS", 0.2)
    assert _is_closed(_opened(port, begin))


def test_bytes_that_drip_do_not_extend_the_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "RECEIVE_SECONDS", 0.5)
    client, until = _opened(port, HALF), time.monotonic() + PATIENCE_SECONDS
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        _drip(client, until)


def test_the_next_request_of_a_connection_has_a_time_limit_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    for seconds in (PATIENCE_SECONDS, 0.2):
        # It holds for the request after the one that is answered now.
        monkeypatch.setattr(http_guard, "RECEIVE_SECONDS", seconds)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"0"
    connection.sock.sendall(HALF)
    assert _is_closed(connection.sock)


def test_connections_that_wait_make_room(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "CONNECTIONS", 8)
    clients = [_opened(port, HALF) for _ in range(40)]
    assert _answer(port) == "3"
    assert all([_is_closed(client) for client in clients[:32]])


def _streaming(port: int, path: str = "/endless") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    connection.request("GET", path)
    return connection.getresponse()


def test_a_request_beside_many_open_answers_is_told_why_it_is_refused(port: int) -> None:
    streams = [_streaming(port) for _ in range(300)]
    refused = [stream for stream in streams if stream.status == 503]
    assert len(refused) == 300 - http_guard.REQUESTS
    assert all(stream.read().startswith(b"The server is busy with 192 requests") for stream in refused)
    assert all(stream.read(1) == b"a" for stream in streams if stream.status == 200)
    streams[0].close()
    until = time.monotonic() + PATIENCE_SECONDS
    while (again := _streaming(port)).status == 503:
        assert time.monotonic() < until
    assert again.read(1) == b"a"


def test_a_client_that_does_not_read_its_answer_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, which read, are not."""
    monkeypatch.setattr(http_guard, "RECEIVE_SECONDS", 0.5)
    reading, _ = _streaming(port), _streaming(port)
    until = time.monotonic() + PATIENCE_SECONDS
    while len(SERVERS[port].server_state.connections) > 1:
        assert time.monotonic() < until
        assert reading.read(2**16)


def test_a_client_that_reads_slowly_gets_all_of_its_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read is within the time limit, all of them are not."""
    monkeypatch.setattr(http_guard, "RECEIVE_SECONDS", 2.0)
    response, size = _streaming(port, "/large"), 0
    while piece := response.read(2**20):
        size += len(piece)
        time.sleep(0.25)
    assert size == 2**24


@pytest.mark.parametrize(
    ("host", "allowed", "sent", "code"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", 200),
        ("127.0.0.1", (), "localhost:8000", 200),
        ("127.0.0.1", (), "evil.example", 421),
        ("127.0.0.1", (), "10.0.0.5", 421),
        ("0.0.0.0", (), "10.0.0.5:8000", 200),
        ("0.0.0.0", (), socket.gethostname(), 200),
        ("0.0.0.0", (), "evil.example", 421),
        ("0.0.0.0", ("Model.example",), "model.example:443", 200),
        ("0.0.0.0", ("model.example",), "evil.example", 421),
        ("0.0.0.0", ("*",), "evil.example", 200),
    ],
)
def test_hosts(host: str, allowed: tuple[str, ...], sent: str, code: int) -> None:
    client = TestClient(HostCheck(APP, HostRules(host, allowed=allowed)), base_url="http://127.0.0.1")
    answer = client.get("/", headers={"Host": sent})
    assert answer.status_code == code
    assert ("--allow-host" in answer.text) == (code == 421)


@pytest.mark.parametrize(
    ("host", "allowed", "sent", "origin", "code"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", "http://localhost:3000", 200),
        ("127.0.0.1", (), "127.0.0.1:8000", "https://evil.example", 421),
        ("127.0.0.1", (), "127.0.0.1:8000", "null", 421),
        ("0.0.0.0", (), "10.0.0.5:8000", "http://10.0.0.5:8000", 200),
        ("0.0.0.0", (), "10.0.0.5:8000", "http://10.0.0.6", 421),
        ("0.0.0.0", ("model.example",), "model.example", "https://model.example", 200),
        ("0.0.0.0", ("*",), "model.example", "https://other.example", 200),
    ],
)
def test_posts_of_pages_of_other_sites_are_refused(
    host: str, allowed: tuple[str, ...], sent: str, origin: str, code: int
) -> None:
    """A browser sends the site of the page as Origin (Fetch standard), `null` for a page without one."""
    client = TestClient(HostCheck(APP, HostRules(host, allowed=allowed)), base_url="http://127.0.0.1")
    assert client.post("/", headers={"Host": sent, "Origin": origin}).status_code == code

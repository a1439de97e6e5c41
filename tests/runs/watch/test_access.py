"""Who may read the pages of `watch`: requests with foreign Host headers are refused, and the pages are confined."""

import socket
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ds_finetune.runs.watch import make_app
from ds_finetune.serving.http_guard import HostCheck, HostRules, is_loopback


def _client(folder: Path, *allowed_hosts: str) -> TestClient:
    return TestClient(make_app(folder, allowed_hosts), base_url="http://127.0.0.1:7117")


@pytest.mark.parametrize("host", ["127.0.0.1:7117", "localhost", "LOCALHOST:80", "[::1]:7117", "localhost."])
def test_own_names_are_served(tmp_path: Path, host: str) -> None:
    answer = _client(tmp_path).get("/", headers={"Host": host})
    assert (answer.status_code, "There is no run" in answer.text) == (200, True)
    assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.5", "", "[", "[evil"]
)
def test_foreign_host_headers_are_refused(tmp_path: Path, host: str) -> None:
    answer = _client(tmp_path, "proxy.example").get("/", headers={"Host": host})
    assert answer.status_code == 421
    assert "run" not in answer.text


def test_a_name_of_a_proxy_can_be_allowed(tmp_path: Path) -> None:
    assert _client(tmp_path, "proxy.example").get("/", headers={"Host": "Proxy.example"}).status_code == 200


def test_names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", lambda: lookups.append("") or "Node1.example")
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("served"))])
    client = TestClient(HostCheck(app, HostRules("0.0.0.0")))
    for _ in range(3):
        assert client.get("/", headers={"Host": "other.example"}).status_code == 421
        for name in ("node1.example:7117", "10.0.0.5:7117"):
            assert client.get("/", headers={"Host": name}).text == "served"
    assert len(lookups) == 1


def test_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node1", "localhost.evil")))

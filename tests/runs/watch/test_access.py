"""Who may read the page: foreign Host headers and missing tokens are refused, and the page is confined."""

import socket

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ds_finetune.runs.watch import AccessCheck
from ds_finetune.serving.http_guard import HostRules, is_loopback


def _client(host: str, token: str = "") -> TestClient:
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("runs"))])
    return TestClient(
        AccessCheck(app, HostRules(host), token), base_url="http://127.0.0.1:7117", follow_redirects=False
    )


@pytest.mark.parametrize("host", ["127.0.0.1:7117", "localhost", "LOCALHOST:80", "[::1]:7117", "localhost."])
def test_own_names_are_served(host: str) -> None:
    answer = _client("127.0.0.1").get("/", headers={"Host": host})
    assert (answer.status_code, answer.text) == (200, "runs")
    assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.5", "", "[", "[evil"]
)
def test_foreign_host_headers_are_refused(host: str) -> None:
    answer = _client("127.0.0.1").get("/", headers={"Host": host})
    assert answer.status_code == 421
    assert "runs" not in answer.text


def test_elsewhere_a_page_of_another_name_is_refused_even_with_the_token() -> None:
    client = _client("0.0.0.0", "secret")
    for host, code in (("evil.example", 421), ("10.0.0.5:7117", 303)):
        assert client.get("/?token=secret", headers={"Host": host}).status_code == code


def test_the_token_is_taken_once_and_kept_in_a_cookie() -> None:
    client = _client("0.0.0.0", "secret")
    for path in ("/", "/?token=", "/?token=wrong", "/?token=s%C3%A9cret"):
        assert client.get(path).status_code == 401, path
    answer = client.get("/?token=secret")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "httponly" in answer.headers["set-cookie"].lower()
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    assert client.get("/").text == "runs"
    client.cookies.set("ds_finetune_watch", "other")
    assert _client("0.0.0.0", "secret").get("/", cookies={"ds_finetune_watch": "x"}).status_code == 401


def test_names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", lambda: asked.append("") or "Node1.example")
    client = _client("0.0.0.0", "secret")
    for _ in range(3):
        assert client.get("/", headers={"Host": "other.example"}).status_code == 421
        assert client.get("/", headers={"Host": "node1.example:7117"}).status_code == 401
    assert len(asked) == 1


def test_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node1", "localhost.evil")))

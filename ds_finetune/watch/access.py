"""Who may read the page: checks of the Host header and the token, and headers that confine the page in the browser."""

import hmac
import ipaddress
import socket
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "ds_finetune_watch"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_OWN_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address that is given as `--host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class AccessRules:
    """`host` is the address on which the page listens; `token` is empty where only this machine reaches it."""

    host: str
    token: str = ""
    own_names: frozenset[str] = field(init=False)
    """Names that lead to this server, looked up once: where a name server does not answer, that takes seconds."""

    def __post_init__(self) -> None:
        names = {*_OWN_NAMES, self.host.lower()}
        if not is_loopback(self.host):
            names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        object.__setattr__(self, "own_names", frozenset(names - {""}))

    def is_own_host(self, header: str) -> bool:
        """Whether a Host header names this server.

        A page of another site that makes its own name resolve to this machine (DNS rebinding) sends that name.
        Addresses in numbers are no names, so they are allowed where the page listens for other machines.
        """
        name = _name_of(header)
        return name in self.own_names or (_is_address(name) and not is_loopback(self.host))

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
        headers = Headers(scope=scope)

        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refusal(scope, headers) or self._app)(scope, receive, send_confined)

    def _refusal(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._rules.is_own_host(hosts[0]):
            return PlainTextResponse("This Host header names another server.\n", status_code=421)
        if not self._rules.token or self._rules.has_token(_cookie(headers)):
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not self._rules.has_token(given):
            text = "The page needs its token: open the address that `ds-finetune watch` has printed.\n"
            return PlainTextResponse(text, status_code=401)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(COOKIE, self._rules.token, httponly=True, samesite="strict")
        return answer


def _cookie(headers: Headers) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""


def _name_of(header: str) -> str:
    """The name or address of a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

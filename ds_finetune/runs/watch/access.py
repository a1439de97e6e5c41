"""Who may read the page: checks of the Host header and the token, and headers that confine the page in the browser."""

import hmac
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds_finetune.serving.http_guard import HostRules, foreign_host

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
        headers = Headers(scope=scope)

        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refusal(scope, headers) or self._app)(scope, receive, send_confined)

    def _refusal(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        if not self._rules.allows(headers):
            return foreign_host()
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

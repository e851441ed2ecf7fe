"""Who may read the page: a link that works once, a cookie for the browser that used it, and nobody else.

Login nodes are shared: every user of the machine can connect to a port of 127.0.0.1.  So each request needs
the cookie, which only the holder of the link gets.  The name in a request's Host header is checked, because
a foreign page may let its own name lead to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HERE = ("127.0.0.1", "localhost")
"""Names by which a browser reaches this machine itself."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer: no foreign script, frame or referrer."""

_METHODS = ("GET", "HEAD")
_BYTES = 32
"""Random bytes of a token."""


class Access:
    """Gate before an application: answers whoever may not read, and passes on who may.

    Attributes:
        token: the token that the next browser exchanges; each works once.
    """

    def __init__(
        self, app: ASGIApp, hosts: Iterable[str] = (), used: Callable[[str], object] = lambda token: None
    ) -> None:
        self._app, self._used = app, used
        self._hosts = {_name(host) for host in (*HERE, *hosts)}
        self.token = secrets.token_urlsafe(_BYTES)
        # Browsers send a cookie to every port of a host: another server's cookie must not replace this one.
        self._cookie = f"everstep-{secrets.token_hex(4)}"
        self._sessions: list[str] = []
        self._lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope) if scope["type"] == "http" else Response(status_code=403)

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await (answer or self._app)(scope, receive, protected)

    def _refusal(self, scope: Scope) -> Response | None:
        """Answer a request that may not pass, or that brings a token; None for all others."""
        headers, path = Headers(scope=scope), scope["path"]
        if scope["method"] not in _METHODS:
            message = f"{scope['method']} changes nothing here: the page only reads; use GET"
            return _refused(headers, 405, message, Allow=", ".join(_METHODS))
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _name(hosts[0]) not in self._hosts:
            message = "this name does not belong to the page; open it as http://127.0.0.1:PORT"
            return _refused(headers, 403, message)
        # A page of another origin may send a request, though it could not read the answer.
        elsewhere = headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        if elsewhere and not (headers.get("sec-fetch-mode", "navigate") == "navigate" and path == "/"):
            return _refused(headers, 403, "another page asked for this; open the page itself")
        pairs = [
            part.strip().partition("=") for each in headers.getlist("cookie") for part in each.split(";")
        ]
        given = [value for name, _, value in pairs if name == self._cookie]
        is_known = any(_equal(one, known) for one in given for known in self._sessions)
        token = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True).get("token")
        if path == "/" and token is not None:
            if is_known:
                return RedirectResponse("/", status_code=303)  # the same link once more, in the same browser
            return self._exchange(token[0], scope["method"], headers)
        message = "the page is for whoever started it; open the link that everstep ui printed"
        return None if is_known else _refused(headers, 401, message)

    def _exchange(self, token: str, method: str, headers: Headers) -> Response:
        with self._lock:
            fits = method == "GET" and _equal(token, self.token)
            if fits:
                self.token, session = secrets.token_urlsafe(_BYTES), secrets.token_urlsafe(_BYTES)
                self._sessions.append(session)
        if not fits:
            message = "this link was used, or is wrong; open the newest that everstep ui printed"
            return _refused(headers, 401, message)
        self._used(self.token)
        answer = RedirectResponse("/", status_code=303)
        # lax: sent when a link elsewhere opens the page; what a page elsewhere asks for is refused above
        answer.set_cookie(self._cookie, session, httponly=True, samesite="lax", path="/")
        return answer


def _equal(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode())


def _name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _refused(request: Headers, status: int, message: str, **headers: str) -> Response:
    """Say why a request is refused: as JSON to a program, as text to a person who opened a link."""
    if "text/html" in request.get("accept", ""):
        return PlainTextResponse(message, status, headers)
    return JSONResponse({"error": message}, status, headers)

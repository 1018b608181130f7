"""Checks who may call, by the key, the page's session, and the Host and Origin of a request.

A page of any site that a person opens can send requests to every address that the person's machine reaches, this one included.
Three checks stop it. Host: a foreign name was made to point here by somebody else (DNS rebinding). Sec-Fetch-Site, or Origin if the
browser does not send that: a write for a page of another origin is refused unless it shows the key, which such a page does not
know. SameSite: browsers do not send the cookie with requests of other sites."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError
from .security_headers import PAGE_HEADERS

COOKIE: Final = "kvpool_session"
SESSION_SECONDS: Final = 12 * 3600
OPEN_PATHS: Final = frozenset({"/health", "/version"})
"""Paths that anybody may request."""
LOGIN_PATHS: Final = frozenset({"/login", "/static/icon.svg", "/static/css/theme.css", "/static/login.css"})
"""Paths that the form for the key needs."""
_ASK_AGAIN: Final = (
    '<!doctype html><title>kvpool</title><meta http-equiv="refresh" content="0; url=/"><a href="/">kvpool</a>'
)
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class AccessKeys:
    """Checks keys, and issues sessions that any gateway with the same keys accepts: no session is stored."""

    def __init__(self, keys: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970, because a session outlives the process."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._clock = clock

    def __repr__(self) -> str:
        return f"Keys({len(self._digests)})"

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: str) -> bytes | None:
        """Return the digest of a valid key; None: it is not valid. All keys are compared, each in constant time."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        valid = None
        for own in self._digests:
            if hmac.compare_digest(own, digest):
                valid = own
        return valid

    def issue(self, digest: bytes) -> str:
        """Make a session for a caller that has shown the key: its end, and a proof of it, which does not reveal the key."""
        end = str(int(self._clock()) + SESSION_SECONDS)
        return f"{end}.{_proof(digest, end)}"

    def accepts(self, session: str) -> bool:
        """Whether the session was made with one of these keys and has not ended."""
        end, _, proof = session.partition(".")
        if not end.isascii() or not end.isdigit() or len(end) > 12 or not proof.isascii():
            return False
        issued = False
        for own in self._digests:
            issued |= hmac.compare_digest(_proof(own, end), proof)
        return issued and int(end) > self._clock()


def _proof(digest: bytes, end: str) -> str:
    return hmac.new(digest, b"kvpool page " + end.encode(), hashlib.sha256).hexdigest()


class Access:
    """ASGI middleware that refuses requests without the right Host, key or Origin."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: AccessKeys,
        allowed_hosts: Sequence[str],
        cors_origins: Sequence[str] = (),
    ) -> None:
        """`allowed_hosts` are names in addition to localhost and IP addresses."""
        self._app = app
        self._keys = keys
        self._hosts = frozenset(name.lower().strip("[]").rstrip(".") for name in allowed_hosts)
        self._origins = frozenset(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer with an error."""
        if scope["type"] == "http":
            try:
                self._require_right(scope)
            except ApiError as error:
                # Here, and not further out, so that a page of an allowed origin may read it.
                await _answer_to(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _require_right(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._require_host(headers.get("host", ""))
        if scope["path"] in OPEN_PATHS:
            return
        has_key = self._require_key(scope, headers)
        if scope["method"] not in _READS and not has_key:
            self._require_origin(headers)

    def _require_host(self, host: str) -> None:
        name = _name_of(host)
        if name in ("localhost", *self._hosts) or _is_address(name):
            return
        raise ApiError(
            HTTPStatus.MISDIRECTED_REQUEST,
            f"this gateway is not known as {name[:255]!r}: start it with --allowed-host, or use an IP address or localhost",
            code="unknown_host",
        )

    def _require_key(self, scope: Scope, headers: Headers) -> bool:
        """Whether the request shows the key itself. Raises ApiError if it needs one and shows neither key nor session."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        if not self._keys:
            return False
        if kind.lower() == "bearer" and self._keys.find(key.strip()) is not None:
            return True
        if scope["path"] in LOGIN_PATHS or self._keys.accepts(session_of(headers)):
            return False
        raise ApiError(
            HTTPStatus.UNAUTHORIZED,
            "this gateway needs one of its keys: send the header 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": 'Bearer realm="kvpool"'},
        )

    def _require_origin(self, headers: Headers) -> None:
        """Raise ApiError unless a write comes from our own page, from an allowed origin, or from a program, which sends neither
        header."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if site is not None:
            # The browser knows it, even if a proxy has changed Host and the page's policy has hidden its origin.
            is_own = site in ("same-origin", "none")
        else:
            # Over http, browsers send Sec-Fetch-Site only to their own machine.
            is_own = origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
        if is_own or (origin is not None and self._origins & {origin, "*"}):
            return
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"pages of {(origin or 'another site')[:255]} may not write here: start the gateway with --cors-origin, or send a key",
            code="foreign_origin",
        )


def _answer_to(scope: Scope, error: ApiError) -> Response:
    """Return the answer to a refused request. A person who opens the page without a session is asked for the key."""
    if error.status != HTTPStatus.UNAUTHORIZED or scope["path"] != "/" or scope["method"] != "GET":
        return error.response()
    if Headers(scope=scope).get("sec-fetch-site") in ("cross-site", "same-site"):
        # The person followed a link of another site, so the browser kept its cookie back. It sends it if our own page asks.
        return HTMLResponse(_ASK_AGAIN, headers=PAGE_HEADERS)
    return RedirectResponse("/login", HTTPStatus.SEE_OTHER)


def session_of(headers: Headers) -> str:
    """Return the page's session in the request; empty: it has none."""
    # Not http.cookies: it gives up at the first cookie that is not written as it likes, and cookies do not keep to one port, so
    # those of every other server of this machine come along.
    for cookie in headers.get("cookie", "").split(";"):
        name, _, value = cookie.partition("=")
        if name.strip() == COOKIE:
            return value.strip()
    return ""


def session_cookie(session: str) -> str:
    """Return the value of Set-Cookie that gives a browser this session; an empty session removes it."""
    age = SESSION_SECONDS if session else 0
    return f"{COOKIE}={session}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict"


def _name_of(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

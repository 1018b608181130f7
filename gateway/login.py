"""The form by which a browser gets a session for the key. Without keys there is no login."""

from __future__ import annotations

from html import escape
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from .access import AccessKeys, session_cookie
from .errors import ApiError
from .security_headers import PAGE_HEADERS

MAX_FORM_BYTES: Final = 8 << 10

_FORM: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvpool: log in</title>
<link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/css/theme.css">
<link rel="stylesheet" href="/static/login.css">
<main>
  <h1>kvpool</h1>
  <form method="post" action="/login">
    <p id="said" role="alert">{said}</p>
    <label for="key">API key of this gateway</label>
    <input id="key" name="key" type="password" autocomplete="current-password" required autofocus aria-describedby="said">
    <button>Log in</button>
  </form>
</main>
</html>
"""


def login_form(said: str = "", status: int = HTTPStatus.OK) -> HTMLResponse:
    """Return the page that asks for the key."""
    return HTMLResponse(_FORM.format(said=escape(said)), int(status), headers=PAGE_HEADERS)


def login_routes(keys: AccessKeys) -> list[BaseRoute]:
    """Return the routes GET and POST /login, POST /logout."""

    async def show(request: Request) -> Response:
        return login_form() if keys else RedirectResponse("/", HTTPStatus.SEE_OTHER)

    async def log_in(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_FORM_BYTES:
                raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the form may have {MAX_FORM_BYTES} bytes")
        key = parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0]
        digest = keys.find(key.strip())
        if digest is None:
            return login_form("This is not one of the gateway's keys.", HTTPStatus.UNAUTHORIZED)
        return RedirectResponse("/", HTTPStatus.SEE_OTHER, headers={"Set-Cookie": session_cookie(keys.issue(digest))})

    async def log_out(request: Request) -> Response:
        return RedirectResponse("/login", HTTPStatus.SEE_OTHER, headers={"Set-Cookie": session_cookie("")})

    return [
        Route("/login", show, methods=["GET"]),
        Route("/login", log_in, methods=["POST"]),
        Route("/logout", log_out, methods=["POST"]),
    ]

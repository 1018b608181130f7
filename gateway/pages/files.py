"""Serves the page's files, which are part of the package and read once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..errors import ApiError
from ..security_headers import PAGE_HEADERS

INDEX: Final = "index.html"
_LOG_OUT: Final = b' id="log-out" hidden'
"""Attributes of the page's form that ends a session. Without keys there is no session, and it stays hidden."""
_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
"""Media types by ending. The system's own table differs from machine to machine, and browsers refuse modules of another type."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page, as it is sent."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> Self:
        """Make the file; its `name` has one of the known endings."""
        return cls(content, _TYPES[PurePosixPath(name).suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def response(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has it."""
        headers = {**PAGE_HEADERS, "ETag": self.etag}
        etags = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if self.etag in etags:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def page_files() -> dict[str, PageFile]:
    """Read all files below static/ with a known ending, by path."""
    static = Path(__file__).parents[1] / "static"
    found = (path for path in sorted(static.rglob("*")) if path.suffix in _TYPES)
    return {path.relative_to(static).as_posix(): PageFile.of(path.name, path.read_bytes()) for path in found}


def file_routes(*, has_login: bool) -> list[BaseRoute]:
    """Return the routes GET / and /static/…. They serve only files that were read at the start, so no path leads out of the
    folder."""
    by_path = page_files()
    if has_login:
        before, _, after = by_path[INDEX].content.partition(_LOG_OUT)
        by_path[INDEX] = PageFile.of(INDEX, before + _LOG_OUT.removesuffix(b" hidden") + after)

    async def index(request: Request) -> Response:
        return by_path[INDEX].response(request)

    async def static(request: Request) -> Response:
        path = request.path_params["path"]
        if path not in by_path:
            raise ApiError(404, f"the page has no file {path[:255]!r}", code="not_found")
        return by_path[path].response(request)

    return [Route("/", index, methods=["GET"]), Route("/static/{path:path}", static, methods=["GET"])]

"""The page itself: its files, which are part of the package, read once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Final, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..errors import ApiError
from ..security_headers import PAGE_HEADERS

INDEX: Final = "index.html"
_LOG_OUT: Final = b' id="log-out" hidden'
"""The page's form that ends a session: without keys there is no session, and it stays hidden."""
_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
"""Not the system's own table, which differs from machine to machine: browsers refuse modules of another type."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> Self:
        """`name` has one of the known endings."""
        return cls(content, _TYPES[PurePosixPath(name).suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def response(self, request: Request) -> Response:
        """The file, or 304 if the browser has it."""
        headers = {**PAGE_HEADERS, "ETag": self.etag}
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def page_files() -> dict[str, PageFile]:
    """All files below static/ by path. What has another ending is none of the page's."""
    return {name: PageFile.of(name, file.read_bytes()) for name, file in _walk(files("kvpool.gateway") / "static", "")}


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = prefix + entry.name
        if entry.is_dir():
            found += _walk(entry, name + "/")
        elif PurePosixPath(name).suffix in _TYPES:
            found.append((name, entry))
    return found


def file_routes(*, has_login: bool) -> list[BaseRoute]:
    """GET / and /static/…. Only names that were found at the start are served, so no path leads out of the folder."""
    known = page_files()
    if has_login:
        before, _, after = known[INDEX].content.partition(_LOG_OUT)
        known[INDEX] = PageFile.of(INDEX, before + _LOG_OUT.removesuffix(b" hidden") + after)

    async def index(request: Request) -> Response:
        return known[INDEX].response(request)

    async def static(request: Request) -> Response:
        path = request.path_params["path"]
        if path not in known:
            raise ApiError(404, f"the page has no file {path[:255]!r}", code="not_found")
        return known[path].response(request)

    return [Route("/", index, methods=["GET"]), Route("/static/{path:path}", static, methods=["GET"])]

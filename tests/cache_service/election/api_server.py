"""A small API server of Kubernetes: Leases, by the documented rules of its API.

* Every write gives the object a new `resourceVersion`. A PUT names the version that it changes: without one it is refused (422:
  Leases allow no unconditional update), with another than the present one it is a conflict (409).
* A POST of a name that exists is a conflict (409). What does not exist is 404.
* A watch streams one event a line for each change after a `resourceVersion`. If that is too old it streams one ERROR with code 410.
  The server ends a watch after some time.
* Requests need the bearer token of the moment (401).

It is no part of Kubernetes, and says nothing of how fast or how available one is. Faults are made by `faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

Body = dict[str, Any]

NAMESPACE = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


class Lost(Exception):
    """The answer does not arrive."""


class ApiServer(httpx.AsyncBaseTransport):
    """Serves clients of this process, without a socket."""

    def __init__(self) -> None:
        self.leases: dict[str, Body] = {}
        self.version = 0
        self.token = ""
        self.watch_seconds = 60.0
        self.oldest_version = 0
        """Of which a watch can still begin."""
        self.requests: list[str] = []
        self.before: Callable[[httpx.Request], Awaitable[None]] = _nothing
        """Runs before each request is executed; may wait, or raise Lost: it is never executed."""
        self.after: Callable[[httpx.Request], Awaitable[None]] = _nothing
        """Runs after it was executed; may wait, or raise Lost."""
        self._events: list[tuple[int, str, Body]] = []
        self._changed = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            await self.before(request)
            answer = self._execute(request)
            await self.after(request)
        except Lost as error:
            raise httpx.ReadError("connection reset", request=request) from error
        return answer

    def _execute(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request.method)
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return _refusal(401, "Unauthorized")
        path = request.url.path
        assert path.startswith(NAMESPACE), path
        name = path[len(NAMESPACE) :].lstrip("/")
        if request.method == "GET" and not name:
            assert request.url.params["watch"] == "1"
            return httpx.Response(200, stream=_Lines(self._watch(dict(request.url.params))))
        if request.method == "GET":
            found = self.leases.get(name)
            return _refusal(404, f'leases "{name}" not found') if found is None else httpx.Response(200, json=found)
        body = json.loads(request.content)
        if request.method == "POST":
            name = body["metadata"]["name"]
            if name in self.leases:
                return _refusal(409, f'leases "{name}" already exists')
            return httpx.Response(201, json=self.write(name, body, "ADDED"))
        assert request.method == "PUT", request.method
        before = self.leases.get(name)
        if before is None:
            return _refusal(404, f'leases "{name}" not found')
        stated = body["metadata"].get("resourceVersion")
        if not stated:
            return _refusal(422, "metadata.resourceVersion: Invalid value: must be specified for an update")
        if stated != before["metadata"]["resourceVersion"]:
            return _refusal(409, f'Operation cannot be fulfilled on leases "{name}": the object has been modified')
        return httpx.Response(200, json=self.write(name, body, "MODIFIED"))

    def write(self, name: str, body: Body, kind: str = "MODIFIED") -> Body:
        """Store a Lease under the next version."""
        self.version += 1
        stored = copy.deepcopy(body)
        stored["metadata"]["resourceVersion"] = str(self.version)
        self.leases[name] = stored
        self._notify(kind, stored)
        return stored

    def delete(self, name: str) -> None:
        self.version += 1
        self._notify("DELETED", self.leases.pop(name))

    def _notify(self, kind: str, body: Body) -> None:
        self._events.append((self.version, kind, body))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self, params: dict[str, str]) -> AsyncIterator[bytes]:
        name = params["fieldSelector"].removeprefix("metadata.name=")
        version = int(params["resourceVersion"])
        if version < self.oldest_version:
            yield _line("ERROR", {"kind": "Status", "code": 410})
            return
        try:
            async with asyncio.timeout(self.watch_seconds):
                while True:
                    changed = self._changed
                    for number, kind, body in self._events:
                        if number > version and body["metadata"]["name"] == name:
                            version = number
                            yield _line(kind, body)
                    await changed.wait()
        except TimeoutError:
            return


class _Lines(httpx.AsyncByteStream):
    def __init__(self, lines: AsyncIterator[bytes]) -> None:
        self._lines = lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for line in self._lines:
            yield line

    async def aclose(self) -> None:
        await self._lines.aclose()  # type: ignore[attr-defined]


def _line(kind: str, body: Body) -> bytes:
    return json.dumps({"type": kind, "object": body}).encode() + b"\n"


def _refusal(code: int, message: str) -> httpx.Response:
    return httpx.Response(code, json={"kind": "Status", "status": "Failure", "code": code, "message": message})


async def _nothing(_: httpx.Request) -> None:
    pass


@contextlib.asynccontextmanager
async def listening(api: ApiServer) -> AsyncIterator[str]:
    """Serve it to other processes over HTTP, on any free port of loopback; gives the URL."""

    async def answer(request: Request) -> StreamingResponse:
        asked = httpx.Request(
            request.method, str(request.url), headers=dict(request.headers), content=await request.body()
        )
        answered = await api.handle_async_request(asked)
        assert isinstance(answered.stream, httpx.AsyncByteStream)
        return StreamingResponse(aiter(answered.stream), answered.status_code, media_type="application/json")

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST", "PUT"])])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server._serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await serving

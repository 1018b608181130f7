"""A model hub on loopback, the part of its HTTP protocol that fetches a model's files; and processes for the hub's client."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.cluster.fork_server import ForkServer

SIGNATURE = "X-Signature=0123456789abcdef"
"""Weights have a signed address, as on the real hub."""
_FRESH_IMPORTS = "tests.model.fresh_imports"
_ROOT = Path(__file__).parents[2]
RunScript = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs a script, with arguments of its own, in an environment of the named variables."""


@dataclass
class Repo:
    """One model repository with one commit per revision, and what is wrong with it."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    token: str | None = None
    """Without it the repo does not show."""
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that the listing tells instead of the true ones."""
    broken: set[str] = field(default_factory=set)
    """Files whose download ends in status 500."""
    cut_once: dict[str, int] = field(default_factory=dict)
    """Files whose first download breaks off after so many bytes."""

    @property
    def sha(self) -> str:
        """The commit that all revisions are at."""
        digest = hashlib.sha1()
        for name in sorted(self.files):
            digest.update(name.encode())
            digest.update(self.files[name])
        return digest.hexdigest()


def repo_of(folder: Path) -> Repo:
    """A repository with the folder's files."""
    return Repo({file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()})


class HubServer:
    """Serves repositories until closed; keeps what was asked for."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        """(method, path without its query, Range header) in the order of arrival."""
        self.status: HTTPStatus | None = None
        """If set, the answer to everything."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def fetched(self) -> list[str]:
        """Names of the files whose content was sent, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/api/" not in path]

    def close(self) -> None:
        """Stop listening. Closing twice is no error."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def fresh_processes(folder: Path) -> Iterator[RunScript]:
    """Scripts run in processes that have not imported the hub's client. `folder`: for what they print."""
    path = os.pathsep.join(map(str, (_ROOT / "common", _ROOT)))
    server = ForkServer({"PATH": os.environ["PATH"], "PYTHONPATH": path}, modules=[_FRESH_IMPORTS])
    out, errors = folder / "stdout", folder / "stderr"

    def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        out.write_bytes(b"")  # a service appends to its log
        command = [script, json.dumps(environment), str(errors), *arguments]
        status = server.start(_FRESH_IMPORTS, command, out).wait(100)
        return subprocess.CompletedProcess(command, status, out.read_text(), errors.read_text())

    try:
        yield run
    finally:
        server.stop()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Tests look at `requests` instead."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.status is not None:
            return self._send(self.hub.status, b"")
        if path.count("/") < 4:
            return self._send(HTTPStatus.NOT_FOUND, b"")
        if path.startswith("/api/models/"):
            org, name, what, revision = path.removeprefix("/api/models/").split("/", 3)
            return self._api(f"{org}/{name}", what, revision)
        org, name, what, rest = path.removeprefix("/").split("/", 3)
        revision, file = rest.rsplit("/", 1)
        return self._file(f"{org}/{name}", what, revision, file)

    def _find(self, repo_id: str, revision: str) -> Repo | None:
        """The repo, or None after the refusal was sent."""
        repo = self.hub.repos.get(repo_id)
        authorization = self.headers.get("Authorization")
        if repo is None or (repo.token is not None and authorization is None):
            # The hub does not tell strangers what it has.
            self._send(HTTPStatus.UNAUTHORIZED, b"", {"X-Error-Code": "RepoNotFound"})
        elif repo.token is not None and authorization != f"Bearer {repo.token}":
            message = "Invalid credentials in Authorization header"
            self._send(HTTPStatus.UNAUTHORIZED, b"", {"X-Error-Message": message})
        elif revision not in (*repo.revisions, repo.sha):
            self._send(HTTPStatus.NOT_FOUND, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return repo
        return None

    def _api(self, repo_id: str, what: str, revision: str) -> None:
        repo = self._find(repo_id, revision)
        if repo is None:
            return
        sizes = {name: repo.claimed_sizes.get(name, len(content)) for name, content in repo.files.items()}
        if what == "revision":
            siblings = [{"rfilename": name, "size": size, "blobId": _etag(name)} for name, size in sizes.items()]
            answer: Any = {"id": repo_id, "modelId": repo_id, "sha": repo.sha, "siblings": siblings, "tags": []}
        else:
            answer = [{"type": "file", "path": name, "size": size, "oid": _etag(name)} for name, size in sizes.items()]
        self._send(HTTPStatus.OK, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repo_id: str, what: str, revision: str, name: str) -> None:
        repo = self._find(repo_id, revision)
        if repo is None:
            return None
        if repo.gated:
            return self._send(HTTPStatus.FORBIDDEN, b"", {"X-Error-Code": "GatedRepo"})
        if name not in repo.files:
            return self._send(HTTPStatus.NOT_FOUND, b"", {"X-Error-Code": "EntryNotFound"})
        content = repo.files[name]
        headers = {"X-Repo-Commit": repo.sha, "ETag": f'"{_etag(repo_id + name)}"', "Accept-Ranges": "bytes"}
        if what == "resolve" and name.endswith((".safetensors", ".gguf")):
            signed = f"{self.hub.url}/{repo_id}/signed/{revision}/{name}?{SIGNATURE}"
            return self._send(HTTPStatus.FOUND, b"", {**headers, "Location": signed})
        if self.command == "GET" and name in repo.broken:
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, b"")
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        status = HTTPStatus.OK
        if begin:
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        cut = repo.cut_once.pop(name, None) if self.command == "GET" else None
        return self._send(status, content[begin:], headers, cut)

    def _send(
        self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True


def _etag(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()

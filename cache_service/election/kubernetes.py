"""Keeps the epoch in a Lease of Kubernetes (coordination.k8s.io/v1): the process that holds the Lease leads.

Holder and epoch change in one request, which the API server executes only if the Lease is still as it was read (`resourceVersion`).
So no two processes lead with one epoch. At most one leads at a time as long as clocks run at about the same pace: the holder ends
before `duration` has passed since it *sent* its last renewal, and another process takes over only after it has seen the Lease
unchanged for `duration`. No times of different machines are compared. (client-go's leader election does the same, apart from the
epoch.)
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import httpx
import structlog

from .epoch import MAX_EPOCH, LeadershipLost, StateError

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.election")

EPOCH_ANNOTATION: Final = "kvpool/epoch"
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with a pod's token and the certificate of the API server."""

SHARE_TO_USE: Final = 0.8
"""Share of the duration for which the holder leads after a renewal: clocks may differ in pace, and ending a process takes time."""
RENEWALS_IN_DURATION: Final = 6
RETRY_SECONDS: Final = 0.25
"""Pause after a request without a clear answer."""
MAX_RETRY_SECONDS: Final = 2.0
"""Longest pause of a process that stands by; its pauses double."""


class LeaseName(NamedTuple):
    """Name of the Lease, written as namespace/name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class _Lease(NamedTuple):
    """A Lease as it was read or written."""

    version: str
    """Opaque resourceVersion, which differs after each change."""
    holder: str
    epoch: int
    duration: float
    """Seconds that its holder has set."""
    body: dict[str, Any]
    """The whole object, so that labels and annotations of others are written back."""


class _Conflict(Exception):
    """The Lease was changed, made or deleted since it was read."""


class _NoAnswer(Exception):
    """The API server has not answered, or its answer does not show what became of the request."""


def boot_seconds() -> float:
    """Return monotonic seconds, which include the time while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseEpochs:
    """An EpochStore in a Lease.

    `api`: URL of the API server; None: that of the cluster in whose pod this process runs. `duration`: whole seconds.
    `transport`: used in place of connections to the API server.
    """

    def __init__(
        self,
        lease: LeaseName,
        *,
        duration: int,
        api: str | None = None,
        service_account: Path = SERVICE_ACCOUNT,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = boot_seconds,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Raises StateError if there is no `api` and this process runs in no pod."""
        self.epoch = 0
        self.found_state = False
        self.identity = f"{socket.gethostname()}_{secrets.token_hex(8)}"
        """Name of this process as a holder: the host's name, for people, and a random number."""
        self._lease = lease
        self._duration = duration
        self._service_account = service_account
        self._clock = clock
        self._leads_until = 0.0
        self._has_ended = False
        """Whether it has stopped leading for good, even if the answer to an earlier renewal still comes."""
        self._waits_for = ""
        """Holder that the log has named last."""
        self._written: _Lease | None = None
        """The Lease as this process last wrote it."""
        self._writing = asyncio.Lock()
        """Held during a write: two writes at once would conflict with each other."""
        self._url, verify = _server(api, service_account, environment)
        self._client = httpx.AsyncClient(verify=verify, trust_env=False, timeout=self._timeout, transport=transport)

    # -- the methods of EpochStore

    async def lead(self) -> None:
        """Wait for the Lease and take it. See EpochStore. If the API server does not answer, or refuses, it is asked again without
        end, and the log says why."""
        seen: _Lease | None = None
        seen_at = 0.0
        pause, why = RETRY_SECONDS, ""
        while True:
            try:
                lease = await self._get()
                if lease is None or seen is None or lease.version != seen.version:
                    seen, seen_at = lease, self._clock()
                await self._wait_and_take(seen, seen_at)
                if self.leads():
                    return
                seen = None  # this process was frozen for so long that another one may lead by now
            except _Conflict:
                continue  # another process was faster, or the Lease has changed
            except _NoAnswer as problem:
                if str(problem) != why:
                    why = str(problem)
                    log.warning("waiting for the API server", lease=str(self._lease), why=why)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)

    def leads(self) -> bool:
        """Whether the last renewal is recent enough. See EpochStore."""
        return not self._has_ended and self._clock() < self._leads_until

    async def keep(self) -> NoReturn:
        """Renew the Lease until cancelled. See EpochStore."""
        pause = self._duration / RENEWALS_IN_DURATION
        while True:
            await asyncio.sleep(min(pause, self._seconds_left))
            if not self.leads():
                raise self._late()
            try:
                async with asyncio.timeout(self._seconds_left), self._writing:
                    await self._write(self.epoch)
                pause = self._duration / RENEWALS_IN_DURATION
            except TimeoutError:
                raise self._late() from None
            except _NoAnswer as problem:
                log.warning("lease not renewed", lease=str(self._lease), why=str(problem))
                pause = RETRY_SECONDS
            except _Conflict as conflict:
                raise self._lost(conflict) from None

    async def raise_above(self, epoch: int) -> int:
        """Raise the epoch in the Lease. See EpochStore."""
        async with self._writing:
            if not self.leads():
                raise LeadershipLost(f"lease {self._lease} was given back, or not renewed in time")
            if self.epoch <= epoch:
                try:
                    await self._write(epoch + 1)
                except _NoAnswer as problem:
                    raise StateError(f"epoch {epoch + 1} cannot be written to lease {self._lease}: {problem}") from None
                except _Conflict as conflict:
                    raise self._lost(conflict) from None
            return self.epoch

    async def release(self) -> None:
        """Remove the holder from the Lease if this process leads. See EpochStore."""
        was_leading, self._has_ended = self.leads(), True
        async with self._writing:  # after a write that is under way
            if was_leading and self._written is not None:
                with contextlib.suppress(_Conflict, _NoAnswer):
                    await self._put(self._changed(self._written, self.epoch, holder=""))
            await self._client.aclose()

    # -- taking and renewing

    async def _wait_and_take(self, lease: _Lease | None, read_at: float) -> None:
        """Become the holder as soon as `lease`, read at `read_at`, is free or has not changed for its duration. Raises _Conflict if
        it has changed by the time of the attempt, _NoAnswer, StateError."""
        while lease is not None and lease.holder not in ("", self.identity):
            if lease.holder != self._waits_for:
                self._waits_for = lease.holder
                log.info("standing by", lease=str(self._lease), holder=lease.holder, epoch=lease.epoch)
            changed = await self._next_change(lease, read_at + lease.duration)
            if changed is None:
                break
            lease, read_at = changed, self._clock()
        before = 0 if lease is None else lease.epoch
        self._require_epoch(before + 1)
        if lease is None:
            lease = await self._post(self._body(before + 1))
        self._written = lease
        await self._write(before + 1, is_new=True)
        self.found_state = before > 0

    async def _next_change(self, lease: _Lease, until: float) -> _Lease | None:
        """Wait for the next change of `lease` and return it; None: there was none until `until`. Raises _Conflict if it was
        deleted, _NoAnswer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - self._clock())):
                while True:
                    async with contextlib.aclosing(self._watch(lease.version)) as changes:
                        async for changed in changes:
                            return changed
                    await asyncio.sleep(RETRY_SECONDS)  # the server has ended the watch, as it does from time to time
                    now = await self._get()
                    if now is None:
                        raise _Conflict("it was deleted")
                    if now.version != lease.version:
                        return now
        return None

    async def _write(self, epoch: int, *, is_new: bool = False) -> None:
        """Write the Lease with this epoch, which renews it; `is_new`: another process may have held it before.

        If an answer is lost, the Lease shows whether the write was applied. If it was, it is repeated, because only a write whose
        time is known renews. Raises _Conflict, _NoAnswer, StateError.
        """
        self._require_epoch(epoch)
        assert self._written is not None
        before = self._written
        while True:
            sent = self._clock()
            try:
                written = await self._put(self._changed(before, max(epoch, before.epoch), is_new=is_new))
                break
            except (_NoAnswer, _Conflict):
                lease = await self._get()
                if lease is None or lease.holder != self.identity:
                    raise _Conflict(
                        "it was deleted" if lease is None else f"{lease.holder or 'nobody'} holds it"
                    ) from None
                if lease.version == before.version:
                    raise
                before, is_new = lease, False
        self._written, self.epoch = written, written.epoch
        self._leads_until = sent + SHARE_TO_USE * self._duration

    @property
    def _seconds_left(self) -> float:
        """Seconds for which this process still leads without a renewal."""
        return max(0.0, self._leads_until - self._clock())

    def _late(self) -> LeadershipLost:
        self._has_ended = True
        return LeadershipLost(f"lease {self._lease} could not be renewed in time")

    def _lost(self, why: _Conflict) -> LeadershipLost:
        self._has_ended = True
        return LeadershipLost(f"lease {self._lease} is not ours any more: {why}")

    def _require_epoch(self, epoch: int) -> None:
        if epoch > MAX_EPOCH:
            raise StateError(
                f"the epochs of lease {self._lease} are used up ({MAX_EPOCH}): give the manager another lease"
            )

    # -- the API

    @property
    def _timeout(self) -> float:
        """Seconds for one request, so that several fit into the rest of the lease when a renewal is due."""
        return max(0.2, self._duration / 5)

    @property
    def _leases(self) -> str:
        return f"{self._url}/apis/coordination.k8s.io/v1/namespaces/{self._lease.namespace}/leases"

    def _body(self, epoch: int) -> dict[str, Any]:
        """Return a new Lease."""
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._lease.name, "annotations": {EPOCH_ANNOTATION: str(epoch)}},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": self._duration,
                "acquireTime": _now(),
                "renewTime": _now(),
                "leaseTransitions": 0,
            },
        }

    def _changed(
        self, before: _Lease, epoch: int, *, is_new: bool = False, holder: str | None = None
    ) -> dict[str, Any]:
        """Return the Lease with this process's changes. The body has its version, so it can be written only if it is still as
        `before`."""
        body = copy.deepcopy(before.body)
        body["metadata"].setdefault("annotations", {})[EPOCH_ANNOTATION] = str(epoch)
        spec = body.setdefault("spec", {})
        spec["holderIdentity"] = self.identity if holder is None else holder
        spec["leaseDurationSeconds"] = self._duration
        spec["renewTime"] = _now()
        if is_new and before.holder != self.identity:
            spec["acquireTime"] = spec["renewTime"]
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        return body

    async def _get(self) -> _Lease | None:
        """Read the Lease; None if there is none."""
        return await self._ask("GET", f"{self._leases}/{self._lease.name}")

    async def _post(self, body: dict[str, Any]) -> _Lease:
        made = await self._ask("POST", self._leases, body)
        if made is None:
            raise _NoAnswer(f"there is no namespace {self._lease.namespace!r}")
        return made

    async def _put(self, body: dict[str, Any]) -> _Lease:
        written = await self._ask("PUT", f"{self._leases}/{self._lease.name}", body)
        if written is None:
            raise _Conflict("it was deleted")
        return written

    async def _ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> _Lease | None:
        """Send a request and return the Lease of the answer; None: there is no such Lease. Raises _Conflict, _NoAnswer."""
        try:
            answer = await self._client.request(method, url, json=body, headers=self._headers())
        except httpx.HTTPError as error:
            raise _NoAnswer(f"{type(error).__name__}: {error}") from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        if answer.status_code == httpx.codes.CONFLICT:
            raise _Conflict("another process has changed it")
        if not answer.is_success:
            raise _NoAnswer(_why(answer))
        try:
            return _read(answer.json())
        except ValueError as error:
            raise _NoAnswer(f"{method} was answered with something else than a Lease: {error}") from error

    async def _watch(self, version: str) -> AsyncGenerator[_Lease, None]:
        """Yield the Lease after each change since `version`, until the server ends the watch. Raises _Conflict (deleted),
        _NoAnswer."""
        selected = {"watch": "1", "fieldSelector": f"metadata.name={self._lease.name}", "resourceVersion": version}
        try:
            async with self._client.stream(
                "GET", self._leases, params=selected, headers=self._headers(), timeout=None
            ) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise _NoAnswer(_why(answer))
                async for line in answer.aiter_lines():
                    event = json.loads(line)
                    if event["type"] in ("ADDED", "MODIFIED"):
                        yield _read(event["object"])
                    elif event["type"] == "DELETED":
                        raise _Conflict("it was deleted")
                    elif event["type"] == "ERROR":
                        return  # e.g. because the version is too old: it is read anew
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise _NoAnswer(f"{type(error).__name__}: {error}") from error

    def _headers(self) -> dict[str, str]:
        # Read anew each time, because tokens are replaced while the process runs.
        try:
            return {"Authorization": f"Bearer {(self._service_account / 'token').read_text().strip()}"}
        except OSError:
            return {}


def _server(
    api: str | None, service_account: Path, environment: Mapping[str, str]
) -> tuple[str, ssl.SSLContext | bool]:
    """Return the URL of the API server and what its certificate is verified with."""
    if api is not None:
        return api.rstrip("/"), True
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise StateError(
            "--election kubernetes needs an API server, and this process runs in no pod: KUBERNETES_SERVICE_HOST is not set; "
            "outside the cluster run `kubectl proxy`, and give its URL with --kubernetes-api"
        )
    try:
        context = ssl.create_default_context(cafile=str(service_account / "ca.crt"))
    except (OSError, ssl.SSLError) as error:
        raise StateError(f"{service_account / 'ca.crt'} cannot be used: {error}") from error
    return f"https://{f'[{host}]' if ':' in host else host}:{port}", context


def _read(body: Any) -> _Lease:
    """Decode a Lease. Raises ValueError."""
    try:
        metadata, spec = body["metadata"], body.get("spec") or {}
        epoch = int((metadata.get("annotations") or {}).get(EPOCH_ANNOTATION, 0))
        if not 0 <= epoch <= MAX_EPOCH:
            raise ValueError(f"epoch {epoch}")
        return _Lease(
            metadata["resourceVersion"],
            spec.get("holderIdentity") or "",
            epoch,
            float(spec.get("leaseDurationSeconds") or 0),
            body,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _now() -> str:
    """Return the time for people; no process compares it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _why(answer: httpx.Response) -> str:
    """Return the API server's reason for a refusal."""
    try:
        message = answer.json()["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    return f"{answer.status_code}: {message}"

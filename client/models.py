"""The models that a client has met, by fingerprint."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final, NamedTuple

import grpc.aio

from kvpool.v1 import cache_pb2, worker_pb2

from .channels import Channels
from .config import ClientConfig
from .deadline import Deadline
from .errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvpoolError,
    NotFound,
    ProtocolError,
    Unavailable,
    from_rpc_error,
)
from .manager import Manager
from .model import Model
from .model_files import receive_model
from .template_process import TemplateProcess

MAX_MODELS: Final = 16
# The facts are one small message: a worker that owes them for so long is frozen, and the next one is asked.
_FACTS_TIMEOUT_SECONDS: Final = 3.0
# Megabytes, from a worker that has shown that it answers.
_FILES_TIMEOUT_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 5.0
"""Time until a worker that did not send its changed facts is asked again; until then another worker's facts are used."""


class KnownModel(NamedTuple):
    """A model as the manager lists it."""

    fingerprint: str
    name: str
    facts: bytes
    """Digest of the facts of the worker that registered last."""
    max_model_len: int
    """The largest of all workers; 0: unknown."""
    max_encoder_tokens: int
    workers: tuple[cache_pb2.WorkerDescription, ...]
    """Its workers; the one that registered last comes first."""
    takes_prompts: bool
    """Whether its workers serve; False: they are leaving, or do not serve yet."""


def served_models(workers: Iterable[cache_pb2.WorkerDescription]) -> list[KnownModel]:
    """List the models of the live workers that serve text, which are those with an address. Workers that are leaving, or do not
    serve yet, count only if a model has no others."""
    by_fingerprint: dict[str, list[cache_pb2.WorkerDescription]] = {}
    for worker in sorted(workers, key=lambda worker: -worker.session):
        if worker.address:
            by_fingerprint.setdefault(worker.model_fingerprint, []).append(worker)
    models = []
    for fingerprint, of_model in by_fingerprint.items():
        serving = [worker for worker in of_model if not worker.draining and not worker.recovering]
        counted = serving or of_model
        models.append(
            KnownModel(
                fingerprint,
                counted[0].model_name,
                counted[0].facts_digest,
                max(worker.max_model_len for worker in counted),
                max(worker.max_encoder_tokens for worker in counted),
                tuple(counted),
                bool(serving),
            )
        )
    return models


class _Known(NamedTuple):
    """A model that is served, as it was fetched last."""

    model: Model
    facts: bytes
    """Digest of the facts that it was made from; the limits may have changed since."""
    retry_at: float
    """Monotonic time before which no worker is asked for newer facts, because the one that has them did not answer."""


class Models:
    """Finds the model that a request names, and keeps what was fetched. Fetches one model at a time.

    The key of a fetched model is the digest of its facts, which the manager lists for each worker. The facts are those of the
    worker that registered last, the limits are the largest of all workers. `settle` compares the digest with that in an answer of
    Route, so the next request notices a change."""

    def __init__(self, manager: Manager, channels: Channels, config: ClientConfig, templates: TemplateProcess) -> None:
        self._manager = manager
        self._channels = channels
        self._max_model_bytes = config.max_model_bytes
        self._templates = templates
        self._fetched: OrderedDict[tuple[str, bytes], Model] = OrderedDict()
        """Fetched models by fingerprint and digest of the facts; the one used last comes last."""
        self._known: dict[str, _Known] = {}
        """The newest facts of each model, by fingerprint."""
        self._fingerprints: dict[str | None, str] = {}
        self._lock = asyncio.Lock()

    async def get(self, name: str | None, deadline: Deadline) -> Model:
        """Return the model of that name or fingerprint, as it was last seen. `name` None: the one that all live workers serve.
        Sends nothing if the model is known.

        Unavailable (NO_WORKER) while no worker lives, or none serves a model that was served before; NotFound if none serves
        `name`, InvalidRequest if None is ambiguous.
        """
        model = self._named(name)
        if model is not None:
            return model
        async with self._turn(deadline):
            # The one before us may have been after the same model.
            model = self._named(name)
            if model is not None:
                return model
            served = await self._resolve(name, deadline)
            return await self._fresh(name, served, deadline)

    async def look(self, name: str | None, deadline: Deadline) -> Model:
        """Ask the manager, and return the model as the workers serve it now. Errors as for `get`."""
        served = await self._resolve(name, deadline)
        if self._is_settled(served.fingerprint, served.facts):
            return self._keep(name, served)
        async with self._turn(deadline):
            return await self._fresh(name, served, deadline)

    async def settle(self, name: str | None, model: Model, current: cache_pb2.ServedModel, deadline: Deadline) -> Model:
        """Return the model as it is now, after Route has answered `current` for it: `model` itself if nothing has changed."""
        fingerprint = model.fingerprint
        if not self._is_settled(fingerprint, current.facts_digest):
            async with self._turn(deadline):
                if not self._is_settled(fingerprint, current.facts_digest):
                    served = await self._resolve(name, deadline)
                    return await self._fresh(name, served, deadline)
        return self._limit(fingerprint, current.max_model_len, current.max_encoder_tokens)

    def forget(self, model: Model) -> None:
        """Forget which names mean `model`, so that the manager is asked again. The fetched model is kept."""
        self._fingerprints = {
            name: fingerprint for name, fingerprint in self._fingerprints.items() if fingerprint != model.fingerprint
        }

    @asynccontextmanager
    async def _turn(self, deadline: Deadline) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self._lock.acquire()
        except TimeoutError:
            deadline.check("waiting for another request to fetch the model")
            raise
        try:
            yield
        finally:
            self._lock.release()

    def _named(self, name: str | None) -> Model | None:
        """Return the model that `name` meant before; None: unknown."""
        entry = self._known.get(self._fingerprints.get(name, ""))
        if entry is None:
            return None
        self._fetched.move_to_end((entry.model.fingerprint, entry.facts))
        return entry.model

    def _is_settled(self, fingerprint: str, facts: bytes) -> bool:
        entry = self._known.get(fingerprint)
        return entry is not None and (entry.facts == facts or time.monotonic() < entry.retry_at)

    async def _resolve(self, name: str | None, deadline: Deadline) -> KnownModel:
        """Ask the manager which model `name` means."""
        workers = (await self._manager.describe(deadline)).workers
        try:
            return resolve(workers, name)
        except NotFound as error:
            if not any(name in (model.name, model.fingerprint) for model in self._fetched.values()):
                raise
            # It was served before. A manager that has just restarted knows the first workers to register, and not yet the others.
            raise Unavailable(str(error), reason="NO_WORKER") from error

    async def _fresh(self, name: str | None, served: KnownModel, deadline: Deadline) -> Model:
        """Return the model as it is served; fetch it unless its facts were fetched before."""
        if not self._is_settled(served.fingerprint, served.facts):
            self._known[served.fingerprint] = await self._find(served, deadline)
        return self._keep(name, served)

    async def _find(self, served: KnownModel, deadline: Deadline) -> _Known:
        """Return the model with these facts, or with another worker's if no worker sends them."""
        key = served.fingerprint, served.facts
        if key in self._fetched:
            return _Known(self._fetched[key], served.facts, 0.0)
        model, facts = await self._fetch(served.workers, served.fingerprint, deadline)
        self._fetched[served.fingerprint, facts] = model
        has_come = facts == served.facts
        return _Known(model, facts, 0.0 if has_come else time.monotonic() + _RETRY_SECONDS)

    def _keep(self, name: str | None, served: KnownModel) -> Model:
        """Remember which model the name means, and its limits."""
        entry = self._known[served.fingerprint]
        self._fingerprints[name] = served.fingerprint
        self._fetched.move_to_end((served.fingerprint, entry.facts))
        while len(self._fetched) > MAX_MODELS:
            dropped = next(iter(self._fetched))
            del self._fetched[dropped]
            if dropped[0] in self._known and self._known[dropped[0]].facts == dropped[1]:
                del self._known[dropped[0]]
        self._fingerprints = {
            name: fingerprint for name, fingerprint in self._fingerprints.items() if fingerprint in self._known
        }
        return self._limit(served.fingerprint, served.max_model_len, served.max_encoder_tokens)

    def _limit(self, fingerprint: str, max_model_len: int, max_encoder_tokens: int) -> Model:
        """Return the model with these limits (0: unknown, as it has them); the same object if they have not changed."""
        entry = self._known[fingerprint]
        model, encoder = entry.model, entry.model.encoder
        if encoder is not None and max_encoder_tokens not in (0, encoder.max_tokens):
            model = replace(model, encoder=replace(encoder, max_tokens=max_encoder_tokens))
        if max_model_len not in (0, model.max_model_len):
            model = replace(model, max_model_len=max_model_len)
        self._known[fingerprint] = entry._replace(model=model)
        return model

    async def _fetch(
        self, serving: Iterable[cache_pb2.WorkerDescription], fingerprint: str, deadline: Deadline
    ) -> tuple[Model, bytes]:
        """Fetch the model from the first worker that answers; returns it with the digest of its facts. Raises the last worker's
        error if none answers."""
        failure: KvpoolError | None = None
        for worker in serving:
            who = f"{worker.worker_id} ({worker.address})"
            deadline.check(f"asking {who} for its model")
            stub = self._channels.worker(worker.address)
            remaining = deadline.remaining()
            longest = _FACTS_TIMEOUT_SECONDS + _FILES_TIMEOUT_SECONDS
            call = stub.GetModel(worker_pb2.GetModelRequest(), timeout=min(longest, remaining))
            try:
                facts, files = await receive_model(
                    aiter(call), who, facts_timeout=_FACTS_TIMEOUT_SECONDS, max_bytes=self._max_model_bytes
                )
            except TimeoutError:
                # If both times are over, the error names the caller's own.
                deadline.check(f"asking {who} for its model")
                failure = _silent(who, f"the facts of its model within {_FACTS_TIMEOUT_SECONDS:g} s")
                continue
            except grpc.aio.AioRpcError as rpc_error:
                failure = from_rpc_error(rpc_error, who)
                if isinstance(failure, DeadlineExceeded):
                    if remaining < longest:
                        raise deadline.exceeded(f"asking {who} for its model") from rpc_error
                    failure = _silent(who, f"the files of its model within {_FILES_TIMEOUT_SECONDS:g} s")
                continue
            finally:
                call.cancel()
            if facts.model_fingerprint != fingerprint:
                failure = Unavailable(
                    f"{who} serves another model than the manager knows; it is registering again",
                    reason="MODEL_CHANGED",
                )
                continue
            # Reading a tokenizer of several megabytes takes a while; other requests go on meanwhile.
            model = await asyncio.to_thread(Model.from_parts, facts, files, self._templates)
            # An engine that does not state the digest has registered none, or the same one.
            return model, facts.facts_digest or worker.facts_digest
        if failure is None:
            raise ProtocolError("a fingerprint without a worker", reason="NO_WORKER")
        raise failure


def _silent(who: str, what: str) -> Unavailable:
    # Not DeadlineExceeded: the request still has time, and the next look at the manager may find other workers.
    return Unavailable(f"{who} did not send {what}", reason="NO_ANSWER")


def resolve(workers: Iterable[cache_pb2.WorkerDescription], name: str | None) -> KnownModel:
    """Find the model that `name` means. Errors as for Models.get."""
    workers = list(workers)
    models = served_models(workers)
    if workers and not models:
        engines = ", ".join(sorted(worker.worker_id for worker in workers))
        raise Unavailable(
            f"no live worker serves text: {engines} registered without an address; start one with `kvpool worker`",
            reason="NO_WORKER",
        )
    if not models:
        raise Unavailable(
            "the manager knows no live worker; start one with `kvpool worker`, or wait until it has loaded its model",
            reason="NO_WORKER",
        )
    served = ", ".join(sorted(f"{model.name} ({model.fingerprint[:12]})" for model in models))
    meant = [model for model in models if name == model.fingerprint]
    if not meant:
        meant = [model for model in models if name is None or name in {worker.model_name for worker in model.workers}]
        # Of those that share a name, one whose workers are leaving makes room for the other.
        meant = [model for model in meant if model.takes_prompts] or meant
    if not meant:
        raise NotFound(f"no live worker serves the model {name!r}; served are {served}", reason="UNKNOWN_MODEL")
    if len(meant) > 1:
        raise InvalidRequest(
            f"several models are served: {served}; say which by name or fingerprint (model=…, --model)",
            reason="AMBIGUOUS_MODEL",
        )
    return meant[0]

"""The models that a client has met, by fingerprint."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

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


class Models:
    """Finds the model that a request means, and keeps what was fetched of it. One fetch at a time."""

    def __init__(self, manager: Manager, channels: Channels, config: ClientConfig, templates: TemplateProcess) -> None:
        self._manager = manager
        self._channels = channels
        self._max_model_bytes = config.max_model_bytes
        self._templates = templates
        self._models: OrderedDict[str, Model] = OrderedDict()
        self._fingerprints: dict[str | None, str] = {}
        self._lock = asyncio.Lock()

    async def get(self, name: str | None, deadline: Deadline) -> Model:
        """The model of that name or fingerprint; None: the one that all live workers serve. Sends nothing if it is known.

        Unavailable (NO_WORKER) while no worker lives, or none serves a model that was served before; NotFound if none serves
        `name`, InvalidRequest if None is ambiguous.
        """
        known = self._known(name)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self._lock.acquire()
        except TimeoutError:
            deadline.check("waiting for another request to fetch the model")
            raise
        try:
            # The one before us may have been after the same model.
            return self._known(name) or await self._find(name, deadline)
        finally:
            self._lock.release()

    def forget(self, model: Model) -> None:
        """Resolve the names that led to `model` again, at the manager. What was fetched of it is kept."""
        self._fingerprints = {
            name: fingerprint for name, fingerprint in self._fingerprints.items() if fingerprint != model.fingerprint
        }

    def _known(self, name: str | None) -> Model | None:
        """The model that `name` led to before, now the one used last."""
        fingerprint = self._fingerprints.get(name)
        if fingerprint is None:
            return None
        self._models.move_to_end(fingerprint)
        return self._models[fingerprint]

    async def _find(self, name: str | None, deadline: Deadline) -> Model:
        """Ask the manager who is meant, and a worker for the model if it was never fetched."""
        workers = (await self._manager.describe(deadline)).workers
        try:
            fingerprint = resolve_fingerprint(workers, name)
        except NotFound as error:
            if not any(name in (model.name, model.fingerprint) for model in self._models.values()):
                raise
            # It was served before. A manager that has just restarted knows the first workers to register, and not yet the others.
            raise Unavailable(str(error), reason="NO_WORKER") from error
        if fingerprint not in self._models:
            serving = [worker for worker in workers if worker.address and worker.model_fingerprint == fingerprint]
            self._models[fingerprint] = await self._fetch(serving, fingerprint, deadline)
        self._models.move_to_end(fingerprint)
        self._remember(name, fingerprint)
        return self._models[fingerprint]

    def _remember(self, name: str | None, fingerprint: str) -> None:
        self._fingerprints[name] = fingerprint
        while len(self._models) > MAX_MODELS:
            dropped, _ = self._models.popitem(last=False)
            self._fingerprints = {name: kept for name, kept in self._fingerprints.items() if kept != dropped}

    async def _fetch(
        self, serving: Iterable[cache_pb2.WorkerDescription], fingerprint: str, deadline: Deadline
    ) -> Model:
        """From the first worker that answers; the last one's error if none does."""
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
            return await asyncio.to_thread(Model.from_parts, facts, files, self._templates)
        if failure is None:
            raise ProtocolError("a fingerprint without a worker", reason="NO_WORKER")
        raise failure


def _silent(who: str, what: str) -> Unavailable:
    # Not DeadlineExceeded: the request still has time, and the next look at the manager may find other workers.
    return Unavailable(f"{who} did not send {what}", reason="NO_ANSWER")


def resolve_fingerprint(workers: Iterable[cache_pb2.WorkerDescription], name: str | None) -> str:
    """The fingerprint meant by `name` among live workers that serve text: those with an address. Changes nothing; errors as
    Models.get."""
    workers = list(workers)
    names = {worker.model_fingerprint: worker.model_name for worker in workers if worker.address}
    if workers and not names:
        engines = ", ".join(sorted(worker.worker_id for worker in workers))
        raise Unavailable(
            f"no live worker serves text: {engines} registered without an address; start one with `kvpool worker`",
            reason="NO_WORKER",
        )
    if not names:
        raise Unavailable(
            "the manager knows no live worker; start one with `kvpool worker`, or wait until it has loaded its model",
            reason="NO_WORKER",
        )
    served = ", ".join(sorted(f"{model} ({fingerprint[:12]})" for fingerprint, model in names.items()))
    if name is None:
        meant = list(names)
    elif name in names:
        meant = [name]
    else:
        meant = [fingerprint for fingerprint, model in names.items() if model == name]
    if not meant:
        raise NotFound(f"no live worker serves the model {name!r}; served are {served}", reason="UNKNOWN_MODEL")
    if len(meant) > 1:
        raise InvalidRequest(
            f"several models are served: {served}; say which by name or fingerprint (model=…, --model)",
            reason="AMBIGUOUS_MODEL",
        )
    return meant[0]

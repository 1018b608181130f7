"""CacheService. Each method decodes, makes one call into the core, and encodes.

Everything runs on the event loop. Only Register awaits before it calls the core, and Check between the slices of an audit, so the
core has one owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import grpc
import structlog
from google.rpc import code_pb2

from kvpool.process.call_status import set_status
from kvpool.v1 import cache_pb2, cache_pb2_grpc

from . import client_codec, explain_codec, status, worker_codec
from .audits import Audits
from .core.closest_prompt import BRIEF, THOROUGH, Bounds
from .core.description import describe_block
from .core.facts import cluster_facts
from .core.manager import CacheManager
from .core.messages import AllocateOutcome, AppendOutcome, Reply, Root, Uplink
from .core.refusal import Reason, Refusal, bad_field
from .core.session import SessionEnd
from .core.session_key import SessionKey
from .counts import EdgeCounts
from .election.epoch import MAX_EPOCH, EpochStore, LeadershipLost, StateError
from .foreign_epochs import ForeignEpochs
from .garbage import collect_young
from .watching.contents import ContentsFeed
from .watching.stream import Watching

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.manager")

MAX_SEQUENCES_PER_ANSWER = 1000
"""Sequences in one answer of Describe, over all workers: more would delay other calls for more than some milliseconds."""

SESSION_KEY_BYTES = 16

Request = TypeVar("Request")
Response = TypeVar("Response")
Message = TypeVar("Message")
Item = TypeVar("Item")
Outcome = TypeVar("Outcome", AllocateOutcome, AppendOutcome)
Context = grpc.aio.ServicerContext[Request, Awaitable[Response]]
Method = Callable[["CacheServicer", Request, Context[Request, Response]], Awaitable[Response]]


@contextlib.contextmanager
def _answered(servicer: CacheServicer, name: str, context: Any, *, is_stream: bool = False) -> Iterator[None]:
    """Turn exceptions of a method into the call's status, and count the call. A bug is logged with its traceback and does not end
    the process."""
    began_at = servicer.clock()
    servicer.counts.on_begun()
    code = code_pb2.CANCELLED  # if nothing else is raised
    try:
        try:
            yield
            code = code_pb2.OK
            return
        except Refusal as refusal:
            servicer.counts.refusals[refusal.reason] += 1
            failure = status.of_refusal(refusal)
        except status.ManagerUnavailable as error:
            failure = status.of_unavailable(error)
        except Exception:
            log.exception("call failed", method=name)
            failure = status.of_bug()
        code = failure.code
        set_status(context, failure)
    finally:
        seconds = None if is_stream else servicer.clock() - began_at
        servicer.counts.on_call(name, code_pb2.Code.Name(code), seconds)


def answering(method: Method[Request, Response]) -> Method[Request, Response]:
    """Answer a call with what the method returns, or with the status of what it raises."""
    name = method.__name__

    @functools.wraps(method)
    async def answer(self: CacheServicer, request: Request, context: Context[Request, Response]) -> Response:
        with _answered(self, name, context):
            self.require_serving()
            return await method(self, request, context)
        return cast(Response, None)  # which gRPC does not send, the status not being OK

    return answer


StreamContext = grpc.aio.ServicerContext[Request, AsyncIterator[Response]]
Stream = Callable[["CacheServicer", Request, StreamContext[Request, Response]], AsyncGenerator[Response, None]]


def answering_stream(method: Stream[Request, Response]) -> Stream[Request, Response]:
    """Do as `answering` for a method that answers with a stream: it is an asynchronous generator, and so is the result."""
    name = method.__name__

    @functools.wraps(method)
    async def answer(
        self: CacheServicer, request: Request, context: StreamContext[Request, Response]
    ) -> AsyncGenerator[Response, None]:
        with _answered(self, name, context, is_stream=True):
            self.require_serving()
            async with contextlib.aclosing(method(self, request, context)) as messages:
                async for message in messages:
                    yield message

    return answer


def make_session_key() -> SessionKey:
    """Make a secret from the operating system's source of randomness: the core has none of its own."""
    return SessionKey(secrets.token_bytes(SESSION_KEY_BYTES))


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """The RPCs. `clock` gives the monotonic seconds that leases are measured in, `make_key` the secret of each new session."""

    def __init__(
        self,
        manager: CacheManager,
        epochs: EpochStore,
        *,
        keep_alive_seconds: float,
        clock: Callable[[], float],
        max_watchers: int = 64,
        max_watch_events: int = 1 << 16,
        max_watch_seconds: float = 0.0,
        make_key: Callable[[], SessionKey] = make_session_key,
        counts: EdgeCounts | None = None,
    ) -> None:
        self._manager = manager
        self._epochs = epochs
        self._epoch_lock = asyncio.Lock()
        self._foreign_epochs = ForeignEpochs(
            epochs.epoch, found_state=epochs.found_state, lease_seconds=manager.lease_seconds
        )
        self.audits = Audits(manager)
        self.counts = counts or EdgeCounts()
        self.watching = Watching(
            manager,
            self.audits,
            ContentsFeed(manager, max_watch_events),
            max_watchers=max_watchers,
            max_seconds=max_watch_seconds,
        )
        self._lease_ms = round(manager.lease_seconds * 1000)
        self._keep_alive_ms = round(keep_alive_seconds * 1000)
        self.clock = clock
        self._make_key = make_key
        self._stopping = False
        self._former_lease_end = clock() + manager.lease_seconds if epochs.found_state else clock()
        """Monotonic time at which the last lease has expired of the sessions that were lost all at once."""

    def require_serving(self) -> None:
        """Raise status.ManagerUnavailable if the manager is about to stop, or if another one may lead by now: this process may have
        been frozen for any time before it handles the call."""
        if self._stopping:
            raise status.ManagerUnavailable("the manager is shutting down: register again when it is back")
        if not self._epochs.leads():
            raise status.LeadsNoLonger

    def refuse_calls(self) -> None:
        """Answer every call from now on with UNAVAILABLE, and end the streams with it, before the connection closes."""
        self._stopping = True
        self.watching.stop()

    # -- sessions

    @answering
    async def Register(
        self, request: cache_pb2.RegisterRequest, context: Context[Any, Any]
    ) -> cache_pb2.RegisterResponse:
        registration = worker_codec.decode_registration(request)
        # Only a worker that would be taken may raise the epoch.
        self._manager.require_acceptable(registration, self.clock())
        await self._outgrow(request.highest_epoch_seen, request.last_session, registration.worker_id)
        earlier = next((one for one in self._manager.sessions if one.worker_id == registration.worker_id), None)
        key = self._make_key()
        epoch, number = self._manager.register(registration, self.clock(), key)
        if earlier is not None:
            log.warning(
                "session fenced", worker_id=earlier.worker_id, session=f"{earlier.number:#x}", by=f"{number:#x}"
            )
        log.info(
            "worker registered",
            worker_id=registration.worker_id,
            session=f"{number:#x}",
            address=registration.address,
            model=registration.model_name,
            num_blocks=[group.num_blocks for group in registration.layout.groups],
            block_size=registration.layout.block_size,
        )
        return cache_pb2.RegisterResponse(
            epoch=epoch,
            session=number,
            lease_ms=self._lease_ms,
            keep_alive_interval_ms=self._keep_alive_ms,
            report_wanted=registration.holds_state,
            session_key=key,
        )

    async def _outgrow(self, seen: int, last_session: int, worker_id: str) -> None:
        """Raise the epoch above one that a worker has seen in another life of the manager, if that is allowed and needed.

        Such an epoch shows that the stored state is older than the worker. The core changes only when the new epoch is durable.
        Raises Refusal: BAD_FIELD, FOREIGN_EPOCH.
        """
        if seen > MAX_EPOCH:
            raise bad_field("highest_epoch_seen", f"at most {MAX_EPOCH}, got {seen}")
        async with self._epoch_lock:
            if not self._is_foreign(seen, last_session):
                return
            if not self._foreign_epochs.may_outgrow(seen, self.clock()):
                raise Refusal(
                    Reason.FOREIGN_EPOCH,
                    f"worker {worker_id!r} has seen epoch {seen} of another life of the manager, and the epoch of this one, "
                    f"{self._manager.epoch}, may not be raised above it: drop all blocks, then register with holds_state false, "
                    "highest_epoch_seen 0 and last_session 0",
                    metadata={"epoch": str(self._manager.epoch)},
                )
            try:
                epoch = await self._epochs.raise_above(seen)
            except LeadershipLost as error:
                log.warning("epoch cannot be raised", why=str(error))
                raise status.LeadsNoLonger from error
            except StateError as error:
                log.warning("epoch cannot be raised", why=str(error))
                raise status.ManagerUnavailable("the manager's epoch cannot be written; see its log") from error
            log.warning("epoch raised", epoch=epoch, before=self._manager.epoch, seen_by=worker_id)
            self._foreign_epochs.on_raised(self.clock())
            self._manager.raise_epoch(epoch)
            # A worker must know the epoch of every stamp that it gets: if the disk loses this epoch too, the worker states it to
            # the next life of the manager, which raises its own above it. So all register again.
            self._former_lease_end = self.clock() + self._manager.lease_seconds
            for session in self._manager.sessions:
                self._manager.end_session(session.number, SessionEnd.EPOCH_RAISED)

    def _is_foreign(self, seen: int, last_session: int) -> bool:
        """Whether the worker may have seen `seen` in another life of the manager that had at least our epoch."""
        if seen != self._manager.epoch:
            return seen > self._manager.epoch
        # A worker that was in a session of ours has our epoch from us. An earlier Register of it does not show that: it may be from
        # before the worker saw our epoch in another life.
        return not self._manager.has_numbered(last_session)

    @answering
    async def Report(self, request: cache_pb2.ReportRequest, context: Context[Any, Any]) -> cache_pb2.ReportResponse:
        num_reports = self._manager.num_reports
        session, reply = self._manager.report(worker_codec.decode_uplink(request), worker_codec.decode_report(request))
        if self._manager.num_reports > num_reports:
            self.counts.report_seconds.observe(self.clock() - session.registered_at)
        if request.live:
            log.info(
                "worker served again",
                worker_id=session.worker_id,
                session=f"{session.number:#x}",
                seconds=round(self.clock() - session.registered_at, 3),
                held=[counts.held for counts in reply.counts],
                sequences=len(session.sequences),
            )
        # Makes the objects of this part old: the collection at the next tick does not visit a whole report.
        collect_young()
        if request.last:
            log.info(
                "report complete",
                worker_id=session.worker_id,
                session=f"{session.number:#x}",
                parts=request.part + 1,
                cached=[counts.cached for counts in reply.counts],
                held=[counts.held for counts in reply.counts],
                reserved=[counts.reserved for counts in reply.counts],
                sequences=len(session.sequences),
            )
        return cache_pb2.ReportResponse(downlink=worker_codec.encode_downlink(reply))

    @answering
    async def KeepAlive(
        self, request: cache_pb2.KeepAliveRequest, context: Context[Any, Any]
    ) -> cache_pb2.KeepAliveResponse:
        load = worker_codec.decode_load(request.load)
        reply = self._manager.keep_alive(
            request.session,
            request.downlink_ack,
            load,
            self.clock(),
            draining=request.draining,
            key=SessionKey(request.session_key),
            answer_ack=request.answer_ack if request.HasField("answer_ack") else None,
        )
        return cache_pb2.KeepAliveResponse(
            lease_ms=self._lease_ms, downlink=worker_codec.encode_downlink(reply), number=reply.heartbeat_no
        )

    @answering
    async def Deregister(
        self, request: cache_pb2.DeregisterRequest, context: Context[Any, Any]
    ) -> cache_pb2.DeregisterResponse:
        session = self._manager.deregister(request.session, SessionKey(request.session_key))
        if session is not None:
            log.info("worker deregistered", worker_id=session.worker_id, session=f"{session.number:#x}")
        return cache_pb2.DeregisterResponse()

    @answering
    async def Drain(self, request: cache_pb2.DrainRequest, context: Context[Any, Any]) -> cache_pb2.DrainResponse:
        grace = request.grace_ms / 1000 if request.HasField("grace_ms") else None
        session = self._manager.drain(request.worker_id, grace)
        log.info("worker draining", worker_id=session.worker_id, session=f"{session.number:#x}")
        return cache_pb2.DrainResponse(session=session.number)

    # -- sequences

    @answering
    async def Allocate(
        self, request: cache_pb2.AllocateRequest, context: Context[Any, Any]
    ) -> cache_pb2.AllocateResponse:
        outcomes, downlink = self._of_batch(
            request, request.items, worker_codec.decode_allocate_item, self._manager.allocate
        )
        return cache_pb2.AllocateResponse(
            downlink=downlink, results=map(worker_codec.encode_allocate_outcome, outcomes)
        )

    @answering
    async def Append(self, request: cache_pb2.AppendRequest, context: Context[Any, Any]) -> cache_pb2.AppendResponse:
        outcomes, downlink = self._of_batch(
            request, request.items, worker_codec.decode_append_item, self._manager.append
        )
        return cache_pb2.AppendResponse(downlink=downlink, results=map(worker_codec.encode_append_outcome, outcomes))

    @answering
    async def Free(self, request: cache_pb2.FreeRequest, context: Context[Any, Any]) -> cache_pb2.FreeResponse:
        uplink = worker_codec.decode_uplink(request)
        reply = self._manager.free(uplink, worker_codec.decode_free_items(request.items))
        return cache_pb2.FreeResponse(downlink=worker_codec.encode_downlink(reply))

    @answering
    async def Fork(self, request: cache_pb2.ForkRequest, context: Context[Any, Any]) -> cache_pb2.ForkResponse:
        outcomes, downlink = self._of_batch(request, request.items, worker_codec.decode_fork_item, self._manager.fork)
        return cache_pb2.ForkResponse(downlink=downlink, results=map(worker_codec.encode_fork_outcome, outcomes))

    def _of_batch(
        self,
        request: cache_pb2.AllocateRequest | cache_pb2.AppendRequest | cache_pb2.ForkRequest,
        items: Iterable[Message],
        decode: Callable[[Message], Item],
        call: Callable[[Uplink, list[Item]], tuple[list[Outcome], Reply]],
    ) -> tuple[list[Outcome | Refusal], cache_pb2.Downlink]:
        """Execute a batch. Returns an outcome for each item, in order, and the downlink that ends the reply."""
        uplink = worker_codec.decode_uplink(request)
        batch = worker_codec.decode_batch(items, decode)
        outcomes, reply = call(uplink, batch.items)
        merged = batch.merge(outcomes)
        self.counts.on_outcomes(merged)
        return merged, worker_codec.encode_downlink(reply)

    # -- clients

    @answering
    async def Route(self, request: cache_pb2.RouteRequest, context: Context[Any, Any]) -> cache_pb2.RouteResponse:
        root = worker_codec.decode_root(request.root)
        workers = self._manager.route(
            root,
            request.tokens,
            request.max_workers,
            num_encoder_tokens=request.num_encoder_tokens,
            num_needed_tokens=request.num_needed_tokens,
        )
        served = self._manager.served_model(root)
        explanation = ""
        if not workers and served is not None:
            explanation = client_codec.explain_no_room(request, served)
        elif not workers:
            explanation = client_codec.explain_no_worker(request.root.model_fingerprint, self._manager.sessions)
        response = client_codec.encode_route(workers, served, explanation)
        if request.explain and workers:
            response.why.CopyFrom(self._explain(root, request.tokens, bounds=BRIEF))
        return response

    @answering
    async def Describe(
        self, request: cache_pb2.DescribeRequest, context: Context[Any, Any]
    ) -> cache_pb2.DescribeResponse:
        manager, worker_id = self._manager, request.worker_id
        if request.include_blocks and not worker_id:
            raise bad_field("worker_id", "include_blocks needs one: a block map is of one worker")
        sessions = (manager.worker(worker_id),) if worker_id else manager.sessions
        blocks = (
            manager.describe_blocks(worker_id, request.first_block, request.max_blocks, request.group)
            if request.include_blocks
            else ()
        )
        max_sequences = min(request.max_sequences, MAX_SEQUENCES_PER_ANSWER // max(1, len(sessions)))
        now, cluster = self.clock(), cluster_facts(manager)
        return cache_pb2.DescribeResponse(
            epoch=manager.epoch,
            workers=[client_codec.encode_worker(session, blocks, max_sequences, now) for session in sessions],
            num_prefix_nodes=cluster.num_prefix_nodes,
            budget=cache_pb2.Budget(**cluster.budget._asdict()),
            former_lease_remaining_ms=client_codec.remaining_ms(self._former_lease_end, now),
        )

    @answering
    async def DescribeBlock(
        self, request: cache_pb2.DescribeBlockRequest, context: Context[Any, Any]
    ) -> cache_pb2.DescribeBlockResponse:
        manager = self._manager
        content = describe_block(manager.worker(request.worker_id), request.block_id, request.group)
        return client_codec.encode_block_content(content, manager.salts, manager.epoch)

    @answering
    async def Explain(self, request: cache_pb2.ExplainRequest, context: Context[Any, Any]) -> cache_pb2.ExplainResponse:
        return self._explain(worker_codec.decode_root(request.root), request.tokens, request.worker_id)

    def _explain(
        self, root: Root, tokens: bytes, worker_id: str = "", bounds: Bounds = THOROUGH
    ) -> cache_pb2.ExplainResponse:
        explanation = self._manager.explain(root, tokens, worker_id, bounds)
        return explain_codec.encode_explanation(explanation, self._manager.epoch, self.clock())

    @answering_stream
    async def Watch(
        self, request: cache_pb2.WatchRequest, context: StreamContext[Any, Any]
    ) -> AsyncGenerator[cache_pb2.WatchResponse, None]:
        call = asyncio.current_task()
        assert call is not None
        async with contextlib.aclosing(self.watching.serve(request, context.peer(), call.cancel)) as messages:
            async for message in messages:
                yield message

    @answering
    async def Check(self, request: cache_pb2.CheckRequest, context: Context[Any, Any]) -> cache_pb2.CheckResponse:
        audit = await self.audits.run()
        if audit.violations:
            log.error("laws broken", count=len(audit.violations), first=audit.violations[0])
        return client_codec.encode_audit(audit)

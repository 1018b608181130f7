"""A manager and workers that say what a test tells them to, over real gRPC on the loopback."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2, worker_pb2, worker_pb2_grpc
from tests.client.words import CAT, SAT, THE, WORDS, text_files

SESSION = 7 << 40 | 1

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def error_status(
    code: int, reason: str, message: str, *details: object, domain: str = "kvpool", **metadata: str
) -> status_pb2.Status:
    """A status as kvpool's services send it: ErrorInfo first, then the other details."""
    status = status_pb2.Status(code=code, message=message)
    info = error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata)
    for detail in (info, *details):
        status.details.add().Pack(detail)
    return status


UNAVAILABLE = error_status(code_pb2.UNAVAILABLE, "DRAINING", "draining")


class Hang:
    """In an answer: say nothing more until the client goes away."""


HANG = Hang()
Step: TypeAlias = worker_pb2.GenerateResponse | status_pb2.Status | asyncio.Event | Hang
"""Send it, fail with it, wait until it is set, or hang."""
Answering: TypeAlias = AsyncIterator[worker_pb2.GenerateResponse | status_pb2.Status]


def usage(num_prompt: int = 4, num_cached: int = 0, num_generated: int = 0) -> worker_pb2.Usage:
    return worker_pb2.Usage(
        num_prompt_tokens=num_prompt, num_cached_tokens=num_cached, num_generated_tokens=num_generated
    )


def answer(*token_ids: int, num_cached: int = 0) -> list[Step]:
    """A proper answer: one message per token, then the end."""
    steps: list[Step] = []
    for index, token in enumerate(token_ids):
        message = worker_pb2.GenerateResponse(start_index=index, token_ids=[token], text=f" {WORDS[token]}")
        if index == 0:
            message.usage.CopyFrom(usage(num_cached=num_cached))
        steps.append(message)
    steps.append(
        worker_pb2.GenerateResponse(
            start_index=len(token_ids),
            usage=usage(num_cached=num_cached, num_generated=len(token_ids)),
            finish_reason=worker_pb2.FINISH_REASON_STOP,
        )
    )
    return steps


@dataclass
class FakeModel:
    """What GetModel answers."""

    name: str = "tiny"
    fingerprint: str = "fp-tiny"
    max_model_len: int = 32
    listed_model_len: int = 0
    """As the manager has it; 0: it states none."""
    vocab_size: int = len(WORDS)
    files: dict[int, bytes] = field(default_factory=lambda: text_files(bos_token="<bos>"))
    is_corrupt: bool = False
    """One byte is changed on the way."""

    def messages(self, worker_id: str) -> list[worker_pb2.GetModelResponse]:
        facts = worker_pb2.ModelFacts(
            worker_id=worker_id,
            model_name=self.name,
            model_fingerprint=self.fingerprint,
            architecture="tiny",
            dtype="float32",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            block_size=4,
            eos_token_ids=[2],
            facts_digest=self.facts_digest,
        )
        parts: list[worker_pb2.GetModelResponse] = []
        for number, content in self.files.items():
            file = cast(worker_pb2.ModelFile, number)
            facts.files.add(file=file, size_bytes=len(content), digest=hashlib.sha256(content).digest())
            sent = bytes([content[0] ^ 1]) + content[1:] if self.is_corrupt else content
            for offset in range(0, len(sent), 100):
                part = worker_pb2.FilePart(file=file, offset_bytes=offset, data=sent[offset : offset + 100])
                parts.append(worker_pb2.GetModelResponse(part=part))
        return [worker_pb2.GetModelResponse(facts=facts), *parts]

    @property
    def facts_digest(self) -> bytes:
        """Of all but the limit."""
        named = json.dumps([self.name, self.fingerprint, self.vocab_size, sorted(self.files.items())], default=str)
        return hashlib.sha256(named.encode()).digest()


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers each request with the next list of steps; the last one is repeated."""

    def __init__(self, worker_id: str, *answers: Sequence[Step], model: FakeModel | None = None) -> None:
        self.worker_id = worker_id
        self.model = model or FakeModel()
        self.answers = deque(answers or [answer(THE, CAT, SAT)])
        self.requests: list[worker_pb2.GenerateRequest] = []
        self.num_model_calls = 0
        self.may_send_model = asyncio.Event()
        self.may_send_model.set()
        self.num_live = 0
        self.num_streams = 0
        self.num_open_streams = 0
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.address = ""
        self.incarnation = 1
        self.session = SESSION
        self.is_draining = False

    async def GetModel(
        self, request: worker_pb2.GetModelRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetModelResponse]:
        self.num_model_calls += 1
        await self.may_send_model.wait()
        for message in self.model.messages(self.worker_id):
            yield message

    def Generate(self, request: worker_pb2.GenerateRequest, context: Context) -> Any:
        """UNIMPLEMENTED: the client library has no use for it."""
        raise NotImplementedError

    async def GenerateMany(
        self, request_iterator: AsyncIterator[worker_pb2.GenerateManyRequest], context: Context
    ) -> AsyncIterator[worker_pb2.GenerateManyResponse]:
        answers: asyncio.Queue[worker_pb2.Answer | None] = asyncio.Queue()
        tasks: dict[int, asyncio.Task[None]] = {}

        async def read() -> None:
            async for message in request_iterator:
                if message.HasField("start"):
                    tasks[message.number] = asyncio.create_task(self._generate(message.number, message.start, answers))
                else:
                    tasks[message.number].cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            answers.put_nowait(None)

        reading = asyncio.create_task(read())
        self.num_streams += 1
        self.num_open_streams += 1
        try:
            while (answer := await answers.get()) is not None:
                yield worker_pb2.GenerateManyResponse(answers=[answer])
        finally:
            self.num_open_streams -= 1
            for task in (reading, *tasks.values()):
                task.cancel()

    async def _generate(
        self, number: int, request: worker_pb2.GenerateRequest, answers: asyncio.Queue[worker_pb2.Answer | None]
    ) -> None:
        self.requests.append(request)
        self.asked.set()
        self.num_live += 1
        num_unfinished = max(1, request.n)
        try:
            async for result in self._answer(request):
                if isinstance(result, status_pb2.Status):
                    answers.put_nowait(worker_pb2.Answer(number=number, status=result))
                    return
                answers.put_nowait(worker_pb2.Answer(number=number, response=result))
                num_unfinished -= bool(result.finish_reason)
                if not num_unfinished:
                    return
            answers.put_nowait(None)  # a stream that ends without an end of the answer
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.num_live -= 1

    async def _answer(self, request: worker_pb2.GenerateRequest) -> Answering:
        for step in self.answers.popleft() if len(self.answers) > 1 else self.answers[0]:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Hang):
                await asyncio.Event().wait()
            else:
                yield step

    def description(self) -> cache_pb2.WorkerDescription:
        config = common_pb2.KVCacheConfig(block_size=4)
        config.groups.add(full_attention=common_pb2.FullAttentionSpec())
        config.pools.add(tier=common_pb2.TIER_DEVICE, num_blocks=12)
        description = cache_pb2.WorkerDescription(
            worker_id=self.worker_id,
            address=self.address,
            session=self.session,
            incarnation=self.incarnation,
            model_name=self.model.name,
            model_fingerprint=self.model.fingerprint,
            kv_cache_config=config,
            max_model_len=self.model.listed_model_len,
            facts_digest=self.model.facts_digest,
        )
        description.counts.add(tier=common_pb2.TIER_DEVICE, capacity=11, free=6, cached=2, held=2, reserved=1, shared=1)
        return description


class FakeManager(cache_pb2_grpc.CacheServiceServicer):
    """Knows the workers that it is given and ranks them in that order."""

    def __init__(self, workers: Sequence[FakeWorker] = ()) -> None:
        self.workers = list(workers)
        self.route_errors: deque[status_pb2.Status] = deque()
        self.routes: list[cache_pb2.RouteRequest] = []
        self.describes: list[cache_pb2.DescribeRequest] = []
        self.blocks: list[cache_pb2.BlockDescription] = []
        self.violations: list[cache_pb2.Violation] = []
        self.drains: list[cache_pb2.DrainRequest] = []
        self.num_drains_forgotten = 0
        """So many Drains are acknowledged and lost, as by a manager that restarts."""
        self.num_describes_until_left = 2
        """After a Drain: the worker is gone from the answers behind that many."""
        self.num_blocks: int | None = None
        self.seconds_to_answer = 0.0
        """Of Route and Describe."""
        self.explains: list[cache_pb2.ExplainRequest] = []
        self.explanation: cache_pb2.ExplainResponse | None = cache_pb2.ExplainResponse()
        """None: Explain fails, and Route says nothing of it."""
        self.before_describe: Callable[[], Awaitable[None]] | None = None
        self.address = ""
        self.former_lease_ms = 0

    async def Route(self, request: cache_pb2.RouteRequest, context: Context) -> cache_pb2.RouteResponse:
        self.routes.append(request)
        await asyncio.sleep(self.seconds_to_answer)
        if self.route_errors:
            await context.abort_with_status(rpc_status.to_status(self.route_errors.popleft()))
        response = cache_pb2.RouteResponse()
        serving = [worker for worker in self.workers if not worker.is_draining]
        of_model = [worker for worker in serving if worker.model.fingerprint == request.root.model_fingerprint]
        for worker in of_model:
            if not 0 < worker.model.listed_model_len < request.num_needed_tokens:
                response.workers.add(
                    worker_id=worker.worker_id, address=worker.address, model_fingerprint=worker.model.fingerprint
                )
        if of_model:
            newest = max(of_model, key=lambda worker: worker.session)
            response.model.facts_digest = newest.model.facts_digest
            response.model.max_model_len = max(worker.model.listed_model_len for worker in of_model)
        if not response.workers:
            response.explanation = "none has room" if of_model else "none registered"
        if request.explain and self.explanation is not None:
            response.why.CopyFrom(self.explanation)
        return response

    async def Describe(self, request: cache_pb2.DescribeRequest, context: Context) -> cache_pb2.DescribeResponse:
        self.describes.append(request)
        await asyncio.sleep(self.seconds_to_answer)
        if self.before_describe is not None:
            await self.before_describe()
        response = cache_pb2.DescribeResponse(
            epoch=7, num_prefix_nodes=3, former_lease_remaining_ms=self.former_lease_ms
        )
        if self.drains:
            if self.num_describes_until_left == 0:
                return response
            self.num_describes_until_left -= 1
        for worker in self.workers:
            if request.worker_id in ("", worker.worker_id):
                description = worker.description()
                description.draining = worker.is_draining or len(self.drains) > self.num_drains_forgotten
                if self.num_blocks is not None:
                    description.kv_cache_config.pools[0].num_blocks = self.num_blocks
                if request.include_blocks:
                    last = request.first_block + (request.max_blocks or 4096)
                    description.blocks.extend(
                        block for block in self.blocks if request.first_block <= block.block_id < last
                    )
                response.workers.append(description)
        return response

    async def Drain(self, request: cache_pb2.DrainRequest, context: Context) -> cache_pb2.DrainResponse:
        self.drains.append(request)
        if request.worker_id not in {worker.worker_id for worker in self.workers}:
            status = error_status(code_pb2.NOT_FOUND, "UNKNOWN_WORKER", f"no live worker {request.worker_id!r}")
            await context.abort_with_status(rpc_status.to_status(status))
        return cache_pb2.DrainResponse(session=SESSION)

    async def Explain(self, request: cache_pb2.ExplainRequest, context: Context) -> cache_pb2.ExplainResponse:
        self.explains.append(request)
        if self.explanation is None:
            await context.abort(grpc.StatusCode.INTERNAL, "a defect")
        return self.explanation

    async def Check(self, request: cache_pb2.CheckRequest, context: Context) -> cache_pb2.CheckResponse:
        return cache_pb2.CheckResponse(violations=self.violations, num_blocks_checked=11)

    async def Register(self, request: object, context: Context) -> NoReturn:
        raise NotImplementedError

    Report = KeepAlive = Allocate = Append = Free = Fork = Deregister = Register
    DescribeBlock = Register

    def Watch(self, request: object, context: Context) -> NoReturn:
        raise NotImplementedError


@asynccontextmanager
async def serving(*servicers: FakeManager | FakeWorker, port: int = 0) -> AsyncIterator[None]:
    """Serve each on a port of its own (or all on `port`, for one) and set its address."""
    servers: list[grpc.aio.Server] = []
    try:
        for servicer in servicers:
            server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            if isinstance(servicer, FakeManager):
                cache_pb2_grpc.add_CacheServiceServicer_to_server(servicer, server)
            else:
                worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
            servicer.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
            await server.start()
            servers.append(server)
        yield
    finally:
        for server in servers:
            await server.stop(None)


@asynccontextmanager
async def fake_cluster(*workers: FakeWorker) -> AsyncIterator[FakeManager]:
    """A manager that knows these workers, all of them serving."""
    manager = FakeManager(workers)
    async with serving(*workers, manager):
        yield manager

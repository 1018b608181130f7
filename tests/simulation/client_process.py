"""A client's process: the real GenerateStream, gate, attempts and manager calls, over the simulated bus."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from kvpool.client.channels import Channels
from kvpool.client.config import ClientConfig
from kvpool.client.deadline import Deadline
from kvpool.client.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvpoolError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvpool.client.manager import Manager
from kvpool.client.model import Model
from kvpool.client.models import Models
from kvpool.client.prompt import EncoderModel, Prompt, routed_prompt
from kvpool.client.request import build_request
from kvpool.client.stream import ClusterAccess, GenerateStream
from kvpool.client.template_process import TemplateProcess
from kvpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2, worker_pb2
from tests.simulation.channel import Channel
from tests.simulation.process import Process
from tests.simulation.worker import FINGERPRINT, MAX_ENCODER_TOKENS, START

if TYPE_CHECKING:
    from tests.simulation.world import World

TIMEOUT_SECONDS = 40.0
_SHARED = "GenerateMany"
"""Carries many requests: they are what its caller asks for, not the call."""
_MAY_FAIL_WITH = (Unavailable, DeadlineExceeded, ResourceExhausted)
"""What a client may be told when its own attempts or its time are used up."""


@dataclass(frozen=True)
class RequestPlan:
    """What one request asks for, and how its reader behaves."""

    number: int
    tenant_salt: str
    prompt: list[int]
    max_tokens: int | None
    cancel_after: float | None
    """Seconds after which the reader goes away."""
    pause: float
    """Seconds that the reader rests between two chunks."""
    tenant: str = ""
    priority: int = 0
    boundaries: tuple[int, ...] = ()
    """From where other prompts will go on, as far as the client knows."""
    n: int = 1
    num_beams: int = 1
    """More than 1: the answers are the best texts of a search."""


class _Channels(Channels):
    def __init__(self, process: ClientProcess) -> None:
        super().__init__()
        self._process = process

    def manager(self, addresses: str) -> cache_pb2_grpc.CacheServiceStub:
        return cache_pb2_grpc.CacheServiceStub(self._process.world.manager_channel(self._process))

    def _open(self, address: str) -> Any:
        return Channel(self._process.world.bus, self._process, address)


class ClientProcess(Process):
    """Sends requests and reads their streams to the end, or not."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, name)
        channels: Any = _Channels(self)
        self._channels = channels
        self._config = ClientConfig(
            manager=",".join(world.manager_addresses), timeout=TIMEOUT_SECONDS, unary_timeout=2.0, worker_wait=1.5
        )
        self._manager = Manager(channels, self._config)
        self._models = Models(self._manager, channels, self._config, TemplateProcess())
        self.num_begun = 0
        self.num_ended = 0

    def on_call(self, method: str) -> None:
        if method != _SHARED:
            self.world.counts[f"operation: client's {method}"] += 1

    def on_request(self, method: str, request: worker_pb2.GenerateManyRequest) -> None:
        if request.WhichOneof("action") == "start":
            self.world.counts[f"operation: client's {method}"] += 1

    # -- requests

    def ask(self, plan: RequestPlan) -> None:
        self.num_begun += 1
        self.spawn(self._ask(plan))

    async def _ask(self, plan: RequestPlan) -> None:
        task = asyncio.create_task(self._read(plan))
        done, _ = await asyncio.wait({task}, timeout=plan.cancel_after)
        if not done:
            self.world.counts["operation: client's cancel"] += 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.num_ended += 1
        self.world.ended(plan, "cancelled" if task.cancelled() else task.result())

    async def _read(self, plan: RequestPlan) -> str:
        """Read the stream to its end and compare each token; returns how it ended."""
        right = self.world.right_texts(plan)

        async def encode(model: Model) -> Prompt:
            return Prompt(list(plan.prompt))

        stream = GenerateStream(
            ClusterAccess(self._config, self._channels, self._manager, self._models),
            encode=encode,
            request=build_request(
                {
                    "max_tokens": plan.max_tokens,
                    "tenant_salt": plan.tenant_salt,
                    "boundaries": plan.boundaries,
                    "tenant": plan.tenant,
                    "priority": plan.priority,
                    "n": plan.n,
                    "num_beams": plan.num_beams,
                    "seed": 0,
                }
            ),
        )
        counts = [0] * plan.n
        attempts = [0] * plan.n
        num_ended = 0
        laws = self.world.laws
        try:
            while True:
                chunk = await stream.next_chunk()
                if chunk is None:
                    break
                laws.count("one right text")
                index, tokens, count = chunk.index, list(chunk.token_ids), counts[chunk.index]
                text, ends_by_itself = right[index]
                if chunk.attempt > max(attempts[index], 1) and count:
                    self.world.counts["streams that went on elsewhere"] += 1
                    self.world.counts["answers that went on elsewhere by themselves"] += plan.n > 1
                attempts[index] = chunk.attempt
                if chunk.start_index != count or tokens != text[count : count + len(tokens)]:
                    gave = f"attempt {chunk.attempt} on {chunk.worker_id} gave {tokens} at {chunk.start_index}"
                    right_are = f"right are {text[count : count + len(tokens)]} at {count}"
                    self.world.fail("one right text", f"request {plan.number}, answer {index}: {gave}; {right_are}")
                    return "wrong"
                counts[index] += len(tokens)
                if chunk.finish_reason is not None:
                    if counts[index] != len(text) or (chunk.finish_reason.value == "stop") != ends_by_itself:
                        how = f"with {chunk.finish_reason} behind {counts[index]} of {len(text)} tokens"
                        self.world.fail("one right text", f"request {plan.number}, answer {index} ended {how}")
                    num_ended += 1
                    if num_ended == plan.n:
                        self.world.counts["requests with several answers"] += plan.n > 1 and plan.num_beams == 1
                        self.world.counts["beam searches"] += plan.num_beams > 1
                        return "text"
                if plan.pause:
                    await asyncio.sleep(plan.pause)
        except KvpoolError as error:
            return self._explain(plan, error)
        finally:
            await stream.aclose()
        self.world.fail("one right text", f"request {plan.number} ended without a finish reason")
        return "wrong"

    def _explain(self, plan: RequestPlan, error: KvpoolError) -> str:
        name = f"{type(error).__name__} {error.reason}"
        never_fits = isinstance(error, InvalidRequest) and error.reason == "NEVER_FITS"
        if never_fits and self.world.may_never_fit(plan):
            return name
        if not isinstance(error, _MAY_FAIL_WITH) or not error.message:
            self.world.fail("explained errors", f"request {plan.number} failed with {error!r}")
        self.world.laws.count("explained errors")
        return name

    # -- other operations

    def look(self, kind: str, argument: Any) -> None:
        """Route, Describe, Check or Drain."""
        self.spawn(self._look(kind, argument))

    def register(self, request: cache_pb2.RegisterRequest) -> None:
        """Send a Register that is nobody's, unless this process is gone."""
        if not self.is_dead:
            self.spawn(self._register(request))

    async def _register(self, request: cache_pb2.RegisterRequest) -> None:
        stub = cache_pb2_grpc.CacheServiceStub(self.world.manager_channel(self))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Register(request, timeout=2.0)
            self.world.counts["made-up Registers taken"] += 1

    async def _look(self, kind: str, argument: Any) -> None:
        deadline = Deadline(3.0)
        try:
            if kind == "route":
                salt, tokens = argument
                root = common_pb2.Root(model_fingerprint=FINGERPRINT, tenant_salt=salt)
                encoder = EncoderModel(MAX_ENCODER_TOKENS, (START,)) if self.world.has_encoder else None
                await self._manager.route(deadline, routed_prompt(root, encoder, tokens))
            elif kind == "describe":
                page: dict[str, Any] = {"include_blocks": True, "first_block": 1} if argument else {}
                request = cache_pb2.DescribeRequest(worker_id=argument, max_blocks=16, **page)
                await self._manager.describe(deadline, request)
            elif kind == "check":
                response = await self._manager.call(lambda stub: stub.Check, cache_pb2.CheckRequest(), deadline)
                if response.violations:
                    self.world.fail("check", f"Check found {response.violations[0]}")
            else:
                worker_id, grace = argument
                drain = cache_pb2.DrainRequest(
                    worker_id=worker_id, grace_ms=None if grace is None else round(grace * 1000)
                )
                await self._manager.call(lambda stub: stub.Drain, drain, deadline)
        except (*_MAY_FAIL_WITH, NotFound):
            pass

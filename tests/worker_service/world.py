"""The real engine, cache side and link over the real manager core, in one process: only the wire is missing, and can be bad."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import pytest
from google.rpc import status_pb2

from kvpool.cache_service import status
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.refusal import Refusal
from kvpool.cache_service.core.session_key import NO_KEY
from kvpool.cache_service.servicer import make_session_key
from kvpool.v1 import cache_pb2
from kvpool.worker_service.cache.engine_cache import EngineCache
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.engine.beam_search import BeamParams
from kvpool.worker_service.engine.engine import Engine
from kvpool.worker_service.engine.errors import EngineError
from kvpool.worker_service.engine.request import GenerationParams, Request
from kvpool.worker_service.engine.settings import EngineSettings
from kvpool.worker_service.manager_link import ManagerLink
from kvpool.worker_service.step import SamplingParams
from tests import manager_calls
from tests.cache_groups import groups_of
from tests.tracer import VOCAB_SIZE, expected_text
from tests.tracer_beams import expected_beams
from tests.worker_service.tracer_model import TracerModel

FINGERPRINT = "tracer"
SEED = 40
"""Of the first of several answers."""


def rpc_error(code: grpc.StatusCode, found: status_pb2.Status | None = None) -> grpc.aio.AioRpcError:
    """What a stub raises, with the rich status where the manager itself has answered."""
    trailing = grpc.aio.Metadata()
    if found is not None:
        trailing.add("grpc-status-details-bin", found.SerializeToString())
    message = found.message if found is not None else "the wire broke"
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=message)


class Wire:
    """A manager behind a wire. Loses requests and replies, and delivers duplicates late, with the given probabilities."""

    def __init__(self, manager: CacheManager, seed: int = 0) -> None:
        self.manager = manager
        self.is_cut = False
        self.lose_request = 0.0
        self.lose_reply = 0.0
        self.repeat_later = 0.0
        self.lease_ms = 6000
        """As Register answers it; this manager ends no session by itself."""
        self.break_reports = False
        """Answer every Report as a manager with a defect does."""
        self.lose_next_reply = ""
        """Name of the method whose next reply is lost."""
        self.num_calls: dict[str, int] = {}
        self.gate: asyncio.Event | None = None
        """If set, mutating calls wait for it before they reach the manager."""
        self._random = random.Random(seed)
        self._late: list[tuple[str, Any]] = []
        self.now = asyncio.get_running_loop().time

    async def _call(self, name: str, request: Any) -> Any:
        await asyncio.sleep(0)
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        if self.gate is not None and name in ("Allocate", "Append", "Free"):
            await self.gate.wait()
        if self.is_cut or self._random.random() < self.lose_request:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE)
        while self._late and self._random.random() < 0.5:
            with contextlib.suppress(Refusal):
                self._execute(*self._late.pop())
        if self._random.random() < self.repeat_later:
            self._late.append((name, request))
        if name == "Report" and self.break_reports:
            raise rpc_error(grpc.StatusCode.INTERNAL, status.of_bug())
        try:
            response = self._execute(name, request)
        except Refusal as refusal:
            found = status.of_refusal(refusal)
            code = next(code for code in grpc.StatusCode if code.value[0] == found.code)
            raise rpc_error(code, found) from None
        if name == self.lose_next_reply:
            self.lose_next_reply = ""
            self.is_cut = True
        if self.is_cut or self._random.random() < self.lose_reply:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED)
        return response

    def _execute(self, name: str, request: Any) -> Any:
        key = make_session_key() if name == "Register" else NO_KEY
        response: Any = manager_calls.execute(self.manager, name, request, self.now(), key)
        if name == "Register":
            response.lease_ms, response.keep_alive_interval_ms = self.lease_ms, 50
        elif name == "KeepAlive":
            response.lease_ms = 6000
        return response

    def __getattr__(self, name: str) -> Any:
        """The stub's methods: `await wire.Allocate(request, timeout=…)`."""
        if not name[0].isupper():
            raise AttributeError(name)

        async def method(request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            return await self._call(name, request)

        return method


class World:
    """One worker with a tracer model, and its manager."""

    def __init__(
        self,
        *,
        num_blocks: int | tuple[int, ...],
        block_size: int,
        worker_id: str = "w0",
        wire: Wire | None = None,
        num_unit_blocks: int = 0,
        **limits: Any,
    ) -> None:
        """`num_unit_blocks`: of the KV of encoder inputs, in a group after the others; 0: the model has no encoder."""
        own = (num_blocks,) if isinstance(num_blocks, int) else num_blocks
        pools = (*own, num_unit_blocks) if num_unit_blocks else own
        cache_settings = CacheSettings(
            block_size=block_size,
            groups=groups_of(pools, unit=len(own) if num_unit_blocks else None),
            report_seconds=limits.pop("report_seconds", 0.005),
            reserve_seconds=limits.pop("reserve_seconds", 2.0),
            prefix_wait_seconds=limits.pop("prefix_wait_seconds", 10.0),
            max_call_bytes=limits.pop("max_call_bytes", 8 << 20),
        )
        self.wire = wire or Wire(CacheManager(1))
        self.model = TracerModel(num_blocks, block_size, num_unit_blocks)
        self.cache = EngineCache(cache_settings)
        settings = EngineSettings(
            model_fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE, **{"max_model_len": 4096, **limits}
        )
        self.engine = Engine(settings, self.cache, self.model, clock=self.wire.now)
        self.is_open = asyncio.Event()
        introduction = cache_pb2.RegisterRequest(
            worker_id=worker_id,
            incarnation=1,
            address="h:1",
            model_fingerprint=FINGERPRINT,
            kv_cache_config=cache_settings.kv_cache_config(),
        )
        self.link = ManagerLink("wire", introduction, self.engine, self._on_session, clock=self.wire.now)
        self._count = 0

    def _on_session(self, is_open: bool) -> None:
        self.is_open.set() if is_open else self.is_open.clear()

    @property
    def manager(self) -> CacheManager:
        return self.wire.manager

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        """Engine and link at work; at the end every law holds and nothing has leaked."""
        tasks = [asyncio.create_task(self.engine.run()), asyncio.create_task(self.link.talk_to(self.wire))]  # type: ignore[arg-type]
        try:
            await self.is_open.wait()
            yield self
            self.wire.is_cut, self.wire.lose_request, self.wire.lose_reply = False, 0.0, 0.0
            await self.until_idle()
            assert self.manager.check().violations == []
            for counts in self.manager.worker(self.link._registration.introduction.worker_id).counts():
                assert (counts.held, counts.reserved) == (0, 0)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                    raise result

    async def until_idle(self) -> None:
        """Until the manager has acknowledged that nothing is held."""
        async with asyncio.timeout(20):
            while not (self.cache.is_ready() and self.cache.is_idle and self.is_known()):
                self.engine.changed_for_link.set()
                await asyncio.sleep(0.002)

    def is_known(self) -> bool:
        """Whether the manager that stands there now knows the session that the worker believes in."""
        return any(session.number == self.cache.session for session in self.manager.sessions)

    def submit(
        self, prompt: list[int], count: int, *, sequence_id: str = "", attempt: int = 1, **params: Any
    ) -> Request:
        """Send one request."""
        self._count += 1
        return self.engine.submit(
            GenerationParams(
                sequence_id or f"s{self._count}",
                attempt,
                list(prompt),
                max_tokens=count,
                **{"sampling": SamplingParams(), **params},
            )
        )

    async def answered(self, prompt: list[int], count: int, **params: Any) -> Request:
        """Send one request and read its texts, which must be the right ones."""
        request = self.submit(prompt, count, **params)
        await read_right(request)
        return request


def prompts_with_shared_beginnings(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Prompts of which many begin alike, some are equal, some unrelated."""
    trunk = [rng.randrange(1000) for _ in range(longest)]
    prompts = []
    for _ in range(count):
        shared = rng.choice([0, longest // 4, longest // 2, longest - 1])
        prompts.append(trunk[:shared] + [rng.randrange(1000) for _ in range(rng.randint(1, max(1, longest - shared)))])
    return prompts


def several(n: int) -> dict[str, Any]:
    """Options of a request for n answers."""
    return {"num_answers": n, "sampling": SamplingParams(temperature=1.0, seed=SEED)}


def searching(num_beams: int, n: int, **params: Any) -> dict[str, Any]:
    """Options of a beam search."""
    return {"num_answers": n, "beams": BeamParams(num_beams, **params), "ignore_eos": True}


async def read_all(request: Request) -> list[list[int]]:
    """The texts of all answers of a stream, to its end. Raises EngineError."""
    texts: list[list[int]] = [[] for _ in range(request.params.num_answers)]
    finished: set[int] = set()
    while (chunk := await request.stream.get()) is not None:
        assert chunk.index not in finished
        assert chunk.start_index == len(texts[chunk.index]) or not chunk.tokens
        texts[chunk.index] += [token.token_id for token in chunk.tokens]
        if chunk.finish_reason is not None:
            finished.add(chunk.index)
    assert len(finished) == len(texts)
    return texts


async def read(request: Request) -> list[int]:
    """The tokens of a stream with one answer, to its end. Raises EngineError."""
    (tokens,) = await read_all(request)
    return tokens


def right_texts(request: Request) -> list[list[int]]:
    """What its answers must be: those of single requests with the next seeds, or what a search finds that shares nothing."""
    params = request.params
    if params.beams is not None:
        found = expected_beams(
            params.token_ids,
            params.max_tokens,
            params.beams,
            params.stop_token_ids,
            encoder_tokens=params.encoder_token_ids,
        )
        return [text for text, _ in found[: params.num_answers]]
    return [
        expected_text(
            params.token_ids,
            params.max_tokens,
            eos_token_ids=params.stop_token_ids,
            seed=params.sampling.seed + index,
            encoder_tokens=params.encoder_token_ids,
        )
        for index in range(params.num_answers)
    ]


async def read_right(*requests: Request) -> None:
    """Read all streams to their ends: each must have its right texts."""
    for request in requests:
        assert await read_all(request) == right_texts(request)


class Failed(NamedTuple):
    """What came of a stream that has failed."""

    tokens: list[int]
    error: EngineError


async def failed(request: Request) -> Failed:
    """Read a stream that must end with an error."""
    tokens: list[int] = []
    with pytest.raises(EngineError) as caught:  # noqa: PT012 - the stream fails in one of these reads
        while (chunk := await request.stream.get()) is not None:
            tokens += [token.token_id for token in chunk.tokens]
    return Failed(tokens, caught.value)

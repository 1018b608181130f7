"""Texts at the worker's edge: what is refused at once, and who waits while a long one is tokenised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from kvpool.v1 import worker_pb2, worker_pb2_grpc
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.prompt import PromptEncoder
from kvpool.worker_service.engine.request import GenerationParams
from kvpool.worker_service.engine.stats import EngineStats
from kvpool.worker_service.servicer import TOKENISE_ALONE_CHARS, TOKENISE_IN_THREAD_CHARS, WorkerServicer
from tests.client.storyteller import byte_tokenizer
from tests.until import until

BOUNDS_SECONDS = 60
MAX_MODEL_LEN = 4 << 20
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class NotingTokenizer:
    """A real tokenizer that notes which texts it is busy with, and waits to be let on."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()
        self._lock = threading.Lock()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.running: list[int] = []
        """Lengths of the texts that are tokenised now."""
        self.max_running = 0
        self.num_done = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str]) -> Any:
        with self._lock:
            self.running.append(len(texts[0]))
            self.max_running = max(self.max_running, len(self.running))
        try:
            assert self.may_go_on.wait(BOUNDS_SECONDS)
            return self._tokenizer.encode_batch_fast(texts)
        finally:
            with self._lock:
                self.running.remove(len(texts[0]))
                self.num_done += 1


class AcceptingEngine:
    """Takes prompts, and ends each request there: the error says how many tokens came."""

    def __init__(self, tokenizer: NotingTokenizer, max_model_len: int) -> None:
        self.prompts = PromptEncoder(tokenizer, max_model_len)  # type: ignore[arg-type]
        self.stats = EngineStats()

    def submit(self, params: GenerationParams) -> None:
        raise EngineError(ErrorKind.NEVER_FITS, f"{len(params.token_ids)} tokens came")


def servicer_of(tokenizer: NotingTokenizer, max_model_len: int = MAX_MODEL_LEN) -> NotingServicer:
    engine = AcceptingEngine(tokenizer, max_model_len)
    facts = worker_pb2.ModelFacts(model_fingerprint="fp")
    return NotingServicer(engine, facts, {}, reader_seconds=0)  # type: ignore[arg-type]


class NotingServicer(WorkerServicer):
    """Counts the requests whose prompt is being made."""

    num_decoding = 0

    async def _decode(self, request: worker_pb2.GenerateRequest) -> GenerationParams:
        self.num_decoding += 1
        try:
            return await super()._decode(request)
        finally:
            self.num_decoding -= 1


@asynccontextmanager
async def served(servicer: WorkerServicer) -> AsyncIterator[worker_pb2_grpc.WorkerServiceStub]:
    server = grpc.aio.server(options=OPTIONS)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
            yield worker_pb2_grpc.WorkerServiceStub(channel)
    finally:
        await server.stop(None)


async def answer_to(stub: worker_pb2_grpc.WorkerServiceStub, text: str) -> tuple[grpc.StatusCode, str]:
    call = stub.Generate(worker_pb2.GenerateRequest(sequence_id="s", attempt=1, text=text), timeout=BOUNDS_SECONDS)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), caught.value.details() or ""


async def test_two_long_texts_are_never_tokenised_at_the_same_time() -> None:
    """While one is, short texts are served, and texts of middling length too."""
    tokenizer = NotingTokenizer()
    tokenizer.may_go_on.clear()
    async with served(servicer_of(tokenizer)) as stub:
        long = [asyncio.create_task(answer_to(stub, "a" * (TOKENISE_ALONE_CHARS + 1 + n))) for n in range(5)]
        await until(lambda: tokenizer.running)
        middling = asyncio.create_task(answer_to(stub, "a" * (TOKENISE_IN_THREAD_CHARS + 1)))
        await until(lambda: TOKENISE_IN_THREAD_CHARS + 1 in tokenizer.running)
        assert len(tokenizer.running) == 2
        tokenizer.may_go_on.set()
        answers = await asyncio.gather(*long, middling)
    assert sorted(details for _, details in answers) == sorted(
        f"{n} tokens came" for n in (*range(TOKENISE_ALONE_CHARS + 1, TOKENISE_ALONE_CHARS + 6), TOKENISE_IN_THREAD_CHARS + 1)
    )  # fmt: skip
    assert (tokenizer.num_done, tokenizer.max_running) == (6, 2)


async def test_what_is_refused_at_once_waits_for_no_long_text() -> None:
    tokenizer = NotingTokenizer()
    tokenizer.may_go_on.clear()
    async with served(servicer_of(tokenizer, TOKENISE_ALONE_CHARS * 2)) as stub:
        long = asyncio.create_task(answer_to(stub, "a" * (TOKENISE_ALONE_CHARS + 1)))
        await until(lambda: tokenizer.running)
        code, details = await answer_to(stub, "a" * 15_000_000)
        assert (code, "15000000 bytes" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert tokenizer.num_done == 0
        tokenizer.may_go_on.set()
        assert (await long)[1] == f"{TOKENISE_ALONE_CHARS + 1} tokens came"


class WatchedTokenizer(NotingTokenizer):
    """Notes how often the event loop came by while the real tokenizer was busy."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ticks = 0
        self.ticks_while_busy: list[int] = []

    def encode_batch_fast(self, texts: list[str]) -> Any:
        before = self.num_ticks
        try:
            return super().encode_batch_fast(texts)
        finally:
            self.ticks_while_busy.append(self.num_ticks - before)

    async def tick(self) -> None:
        while True:
            self.num_ticks += 1
            await asyncio.sleep(0)


async def test_the_loop_goes_on_while_a_long_text_is_tokenised() -> None:
    """Nobody but the tokenizer's own thread could count if it held the GIL."""
    tokenizer = WatchedTokenizer()
    async with served(servicer_of(tokenizer)) as stub:
        ticking = asyncio.create_task(tokenizer.tick())
        _, details = await answer_to(stub, "a " * 1_000_000)
        ticking.cancel()
    assert details == "2000000 tokens came"
    (ticks,) = tokenizer.ticks_while_busy
    assert ticks > 1


async def test_a_caller_that_leaves_while_it_waits_costs_no_tokenising() -> None:
    tokenizer = NotingTokenizer()
    tokenizer.may_go_on.clear()
    servicer = servicer_of(tokenizer)
    async with served(servicer) as stub:
        first = asyncio.create_task(answer_to(stub, "a" * (TOKENISE_ALONE_CHARS + 1)))
        await until(lambda: tokenizer.running)
        leaving = asyncio.create_task(answer_to(stub, "a" * (TOKENISE_ALONE_CHARS + 2)))
        await until(lambda: servicer.num_decoding == 2)
        leaving.cancel()
        await until(lambda: servicer.num_decoding == 1)
        last = asyncio.create_task(answer_to(stub, "a" * (TOKENISE_ALONE_CHARS + 3)))
        tokenizer.may_go_on.set()
        assert [(await task)[1] for task in (first, last)] == [
            f"{TOKENISE_ALONE_CHARS + n} tokens came" for n in (1, 3)
        ]
    assert tokenizer.num_done == 2

"""The cluster that is attacked, and how it must be after every attack."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.cluster.cluster import GATEWAY, MANAGER, Cluster
from tests.hostile.good_client import PAUSE_SECONDS, GoodClient, Question, Task, ask_over_http
from tests.tiny_models import MIN_MARGIN, Oracle, TinyModel, make_tiny_model, prompts

WORKERS: Final = ("victim", "other")
"""Two of one model, so that a good client has a second one to go to while the first must register again."""
VICTIM: Final = WORKERS[0]
BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 512
NUM_QUESTIONS: Final = 12
NUM_TOKENS: Final = 8
STEP_SECONDS: Final = 0.005
"""A stream that is attacked lasts, and leaves the processor to others."""
CALL_SECONDS: Final = 10.0
KEEP_ALIVE_SECONDS: Final = 1.0
"""At most, and four in a lease."""
GATEWAY_SETTINGS: Final[dict[str, Any]] = {
    # So that the waits are short, and that lines in the log are complaints.
    "head_seconds": 1,
    "body_seconds": 1,
    "reader_seconds": 1,
    "log_level": "warning",
}
CHANNEL_OPTIONS: Final = (
    # Else channels of one process share a connection, and one that lives hides that no new one is accepted.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


class Arena:
    """A manager, two workers with a tiny model and a gateway, each a process of its own, and the right answers to some questions.

    `async with` starts them. After an attack that they did not survive `rebuild` starts new ones.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lease_seconds: float = 6.0,
        worker_settings: dict[str, Any] | None = None,
        pause_seconds: float = PAUSE_SECONDS,
        turn_seconds: float | None = None,
    ) -> None:
        """`pause_seconds`: of good clients. `turn_seconds`: of streams of Watch."""
        self._folder = folder
        self._pause_seconds = pause_seconds
        self._turn_seconds = turn_seconds
        self.lease_seconds = lease_seconds
        self._worker_settings = worker_settings or {}
        self._numbers = itertools.count(1)
        self.model: TinyModel = make_tiny_model("llama", folder / "model", tokenizer=True)
        self.oracle = Oracle.of(self.model.path)
        self.questions = self._questions()
        self.cluster: Cluster
        self.model_fingerprint = ""
        self._pids: dict[str, int] = {}

    def _questions(self) -> list[Question]:
        """Some that share beginnings and some that do not, each with one right answer beyond doubt."""
        own = [tuple((7 * number + 11 * at) % 251 for at in range(10 + 5 * number)) for number in range(NUM_QUESTIONS)]
        found = [
            Question(prompt, tuple(self.oracle.logits(prompt, NUM_TOKENS)[0]))
            for prompt in (*prompts(), *own)
            if self.oracle.margin(prompt, NUM_TOKENS) >= MIN_MARGIN
        ]
        assert len(found) >= NUM_QUESTIONS, "too few prompts prove something"
        return found[:NUM_QUESTIONS]

    # -- processes

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.cluster.__aexit__(*error)

    async def _start(self) -> None:
        folder = self._folder / f"cluster-{next(self._numbers)}"
        folder.mkdir()
        cluster = Cluster(
            folder,
            lease_seconds=self.lease_seconds,
            keep_alive_seconds=min(self.lease_seconds / 4, KEEP_ALIVE_SECONDS),
            **({} if self._turn_seconds is None else {"turn_seconds": self._turn_seconds}),
        )
        self.cluster = await cluster.__aenter__()
        worker = {
            "model": self.model.path,
            "block_size": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS,
            "step_seconds": STEP_SECONDS,
            **self._worker_settings,
        }
        await self.cluster.start(dict.fromkeys(WORKERS, worker))
        await self.cluster.start_gateway(**GATEWAY_SETTINGS)
        self._pids = {name: process.pid for name, process in self.cluster.processes.items()}
        self.model_fingerprint = (await self.described(VICTIM)).model_fingerprint

    async def rebuild(self) -> None:
        """New processes with a state of their own, in place of what an attack has left."""
        await self.cluster.__aexit__(None, None, None)
        await self._start()

    def good_client(self) -> GoodClient:
        """One that asks the cluster of now. Use it as `async with`."""
        address, questions = self.cluster.address(), self.questions
        task = Task(address, self.gateway_url, self.model_fingerprint, questions, self._pause_seconds)
        return GoodClient(task)

    @property
    def gateway_url(self) -> str:
        return f"http://{self.cluster.address(GATEWAY)}"

    @property
    def services(self) -> tuple[str, ...]:
        return (MANAGER, *WORKERS)

    # -- what it is asked on connections of their own

    def channel(self, name: str = MANAGER) -> grpc.aio.Channel:
        """A new connection; the caller closes it."""
        return grpc.aio.insecure_channel(self.cluster.address(name), options=CHANNEL_OPTIONS)

    def stub(self, channel: grpc.aio.Channel) -> cache_pb2_grpc.CacheServiceStub:
        return cache_pb2_grpc.CacheServiceStub(channel)

    async def describe(self, **request: Any) -> cache_pb2.DescribeResponse:
        """Over a new connection. Raises AioRpcError."""
        async with self.channel() as channel:
            return await self.stub(channel).Describe(cache_pb2.DescribeRequest(**request), timeout=CALL_SECONDS)

    async def described(self, worker: str, **request: Any) -> cache_pb2.WorkerDescription:
        """One worker, over a new connection. Raises AioRpcError."""
        return (await self.describe(worker_id=worker, **request)).workers[0]

    def open_stream(
        self, channel: grpc.aio.Channel, prompt: Sequence[int], **fields: Any
    ) -> grpc.aio.UnaryStreamCall[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]:
        """Generate on the worker at the other end of the channel; greedy, NUM_TOKENS tokens unless `fields` say otherwise."""
        request = worker_pb2.GenerateRequest(
            sequence_id=f"arena-{time.monotonic_ns()}-{next(self._numbers)}",
            attempt=1,
            token_ids=worker_pb2.TokenIds(ids=prompt),
            stop=worker_pb2.StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True),
        )
        request.MergeFrom(worker_pb2.GenerateRequest(**fields))
        return worker_pb2_grpc.WorkerServiceStub(channel).Generate(request, timeout=CALL_SECONDS)

    async def answer(self, worker: str, prompt: Sequence[int], **fields: Any) -> tuple[int, ...]:
        """The tokens of one answer, from that very worker, over a new connection. Raises AioRpcError."""
        async with self.channel(worker) as channel:
            return tuple(
                [token async for part in self.open_stream(channel, prompt, **fields) for token in part.token_ids]
            )

    # -- how it must be

    def ended(self) -> list[str]:
        """Processes that are not the ones that were started."""
        found = []
        for name, process in self.cluster.processes.items():
            if process.status is not None:
                found.append(f"the process of {name} has ended with status {process.status}")
            elif process.pid != self._pids[name]:
                found.append(f"{name} is another process than at the start")
        return found

    async def problems(self, seconds: float) -> list[str]:
        """What is wrong with the cluster, on new connections; empty as soon as nothing is, at most `seconds` later.

        Nothing is wrong: no process has ended, each service says that it serves, both workers are registered under their
        own addresses and not draining, each gives a right answer, so does the gateway, it has not failed, and every law of
        the manager holds.
        """
        deadline = time.monotonic() + seconds
        while True:
            if ended := self.ended():
                return ended
            try:
                found = await self._problem()
            except grpc.aio.AioRpcError as error:
                found = f"{error.code().name}: {error.details()}"
            except httpx.HTTPError as error:
                found = f"the gateway does not answer: {error!r}"
            if found is None:
                return []
            if time.monotonic() >= deadline:
                return [f"{found} ({seconds:g} s after the attack)"]
            await asyncio.sleep(0.1)

    async def _problem(self) -> str | None:
        for name in self.services:
            async with self.channel(name) as channel:
                try:
                    health: Any = health_pb2_grpc.HealthStub(channel)
                    state = (await health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)).status
                except grpc.aio.AioRpcError as error:
                    return f"{name} does not answer a new connection: {error.code().name}: {error.details()}"
            if state != health_pb2.HealthCheckResponse.SERVING:
                return f"{name} says that it does not serve"
        for number, name in enumerate(WORKERS):
            worker = await self.described(name)
            if worker.address != self.cluster.address(name):
                return f"{name} is registered as {worker.address}, not as {self.cluster.address(name)}"
            if worker.draining or worker.recovering:
                return f"{name} takes no requests: draining {worker.draining}, recovering {worker.recovering}"
            question = self.questions[number]
            try:
                tokens = await self.answer(name, question.prompt)
            except grpc.aio.AioRpcError as error:
                return f"{name} does not answer a request: {error.code().name}: {error.details()}"
            if tokens != question.tokens:
                return f"{name} answered {list(tokens)}, not {list(question.tokens)}"
        if (found := await self._problem_of_gateway()) is not None:
            return found
        async with self.channel() as channel:
            violations = (await self.stub(channel).Check(cache_pb2.CheckRequest(), timeout=CALL_SECONDS)).violations
        return f"check: {violations[0].law}: {violations[0].message}" if violations else None

    async def _problem_of_gateway(self) -> str | None:
        question = self.questions[-1]
        tokens = await ask_over_http(self.gateway_url, self.model_fingerprint, question, CALL_SECONDS)
        if tokens != question.tokens:
            return f"the gateway answered {list(tokens)}, not {list(question.tokens)}"
        log = self.cluster.processes[GATEWAY].log
        return "the gateway's log has a traceback" if "Traceback" in log else None

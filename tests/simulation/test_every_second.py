"""A kind of group that only the tests have runs through the simulator: next to workers with all other kinds, under the same faults.

The manager's side is the real one, with the kind entered in its tables. The worker is a small driver that speaks the protocol, not
the product's cache side. On the wire the kind has the place of cross attention, in runs whose other workers have no encoder.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from kvpool.cache_service import group_codec
from kvpool.cache_service.core import groups
from kvpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2
from tests.cache_service.core.every_second import EverySecondGroup, EverySecondSpec
from tests.cache_service.edge.peer import BLOCK_SIZE, Worker, item, registration
from tests.cache_service.edge.peer import tokens as encoded
from tests.simulation.process import Process
from tests.simulation.world import World

FINGERPRINT = "every second"
NUM_BLOCKS = (25, 12)
"""Of the group that sees everything, and of the one that sees every second block."""
SEEDS = (0, 2, 3, 4, 5, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecOnTheWire(EverySecondSpec):
    """With the fields of the message whose place it has."""

    max_encoder_tokens: int


class _SessionEnded(Exception):
    """The worker must register again."""


class _Sequence:
    """A prompt that it computes; `tables`: by group, blocks and generations by index of the text's blocks."""

    def __init__(self, key: common_pb2.SequenceKey, tokens: list[int], granted: cache_pb2.Granted) -> None:
        self.key = key
        self.tokens = tokens
        self.num_computed = granted.num_cached_tokens
        dense, second = (dict(enumerate(zip(run.block_ids, run.generations, strict=True))) for run in granted.tables)
        self.tables = [dense, {2 * entry: block for entry, block in second.items()}]

    def contents(self, begin: int, end: int) -> Iterable[tuple[int, int, int, tuple[int, ...]]]:
        """Group, block, generation and prefix of what is in the blocks begin … end − 1 of the text."""
        for group, table in enumerate(self.tables):
            for index, (block, generation) in table.items():
                if begin <= index < end:
                    yield group, block, generation, tuple(self.tokens[: (index + 1) * BLOCK_SIZE])


class EverySecondWorker(Worker):
    """Serves prompts of its own, one call at a time, until the run ends. It remembers what it wrote into each block."""

    def __init__(self, process: Process, draw: random.Random) -> None:
        introduction = registration(FINGERPRINT, model_fingerprint=FINGERPRINT)
        introduction.ClearField("address")  # so that no client asks it
        config = introduction.kv_cache_config
        config.groups.add(group=1).cross_attention.SetInParent()
        config.pools.add(group=1, tier=common_pb2.TIER_DEVICE)
        for pool, num_blocks in zip(config.pools, NUM_BLOCKS, strict=True):
            pool.num_blocks = num_blocks
        super().__init__(cache_pb2_grpc.CacheServiceStub(process.world.manager_channel(process)), introduction)
        self._process = process
        self._draw = draw
        self._base = [draw.randrange(9) for _ in range(24)]
        self._num_prompts = 0
        self.num_hits = 0
        self.num_sessions = 0

    def begin_text(self) -> None:
        self._process.spawn(self._run())

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(_SessionEnded):
                # With nothing in its blocks.
                self._written: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
                self._live: list[_Sequence] = []
                await self._call(self.register)
                self.num_sessions += 1
                while True:
                    await self._turn()
                    await asyncio.sleep(self._draw.choice([0.01, 0.05, 0.3]))
            await asyncio.sleep(0.1)

    async def _call(self, method: Callable[..., Awaitable[Any]], *what: Any) -> Any:
        """The answer, asked for until it comes."""
        while True:
            try:
                async with asyncio.timeout(1.0):
                    answer = await method(*what)
            except TimeoutError:
                continue
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise _SessionEnded from None
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)
                continue
            if method != self.register:
                self.downlink_ack = max([self.downlink_ack, *(one.number for one in answer.downlink.entries)])
            return answer

    async def _turn(self) -> None:
        await self._call(self.keep_alive)
        if len(self._live) < 2:
            await self._ask()
        else:
            await self._go_on(self._draw.choice(self._live))

    async def _ask(self) -> None:
        self._num_prompts += 1
        tokens = self._base[: self._draw.choice([4, 11, 16, 24])] + [9 + self._num_prompts % 5] * self._draw.randint(
            1, 5
        )
        asked = item(f"{self.num_sessions}.{self._num_prompts}", encoded(*tokens), no_wait=self._draw.random() < 0.5)
        asked.root.model_fingerprint = FINGERPRINT
        (result,) = (await self._call(self.allocate, asked)).results
        if result.HasField("granted"):
            sequence = _Sequence(asked.key, tokens, result.granted)
            self._live.append(sequence)
            self._require_right_hits(sequence)
        elif self._live:  # it is to wait, or there are no blocks
            await self._go_on(self._draw.choice(self._live))

    def _require_right_hits(self, sequence: _Sequence) -> None:
        num_hits = sequence.num_computed // BLOCK_SIZE
        self.num_hits += num_hits
        for group, block, generation, prefix in sequence.contents(0, num_hits):
            if self._written.get((group, block)) != (generation, prefix):
                self._process.world.fail("exact hits", f"block {block} of group {group} does not hold {prefix}")

    async def _go_on(self, sequence: _Sequence) -> None:
        """One more block, or what is left; then the end."""
        num_computed = min(sequence.num_computed + BLOCK_SIZE, len(sequence.tokens))
        if num_computed == sequence.num_computed:
            self._live.remove(sequence)
            await self._call(self.free, cache_pb2.SequenceUpdate(key=sequence.key))
            return
        for group, block, generation, prefix in sequence.contents(
            sequence.num_computed // BLOCK_SIZE, num_computed // BLOCK_SIZE
        ):
            self._written[group, block] = generation, prefix
        sequence.num_computed = num_computed
        update = cache_pb2.SequenceUpdate(key=sequence.key, num_computed_tokens=num_computed)
        (result,) = (await self._call(self.append, update)).results
        assert not result.status.code, result.status.message


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kind_of_the_tests_own_runs_through_the_simulator(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(groups.KINDS, SpecOnTheWire, EverySecondGroup)
    monkeypatch.setitem(group_codec.KINDS, "cross_attention", SpecOnTheWire)
    world = World(seed)
    assert not world.has_encoder, "its place on the wire is taken"
    process = Process(world, FINGERPRINT, FINGERPRINT)
    worker = EverySecondWorker(process, random.Random(seed))
    world.kernel.at(1.0, worker.begin_text)
    result = world.run()
    assert result.violation is None
    assert result.counts["law: conservation"] > 100
    assert worker.num_sessions > 1, "the run has faults"
    assert worker.num_hits > 20

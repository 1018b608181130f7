"""A kind of group that only the tests have runs through the simulator: next to workers with all other kinds, under the same faults.

The manager's side is the real one, with the kind entered in its tables. The worker is a small driver that speaks the protocol, not
the product's cache side. On the wire the kind has the place of cross attention, in runs whose other workers have no encoder.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from kvpool.cache_service import group_codec
from kvpool.cache_service.core import groups
from kvpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2
from tests.cache_service.core.every_second import EverySecondGroup, EverySecondSpec
from tests.simulation.process import Process
from tests.simulation.world import World

FINGERPRINT = "every second"
BLOCK_SIZE = 4
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


class EverySecondWorker:
    """Serves prompts of its own, one call at a time, until the run ends. It remembers what it wrote into each block."""

    def __init__(self, process: Process, draw: random.Random) -> None:
        self._process = process
        self._draw = draw
        self._stub: Any = cache_pb2_grpc.CacheServiceStub(process.world.manager_channel(process))
        self._base = [draw.randrange(9) for _ in range(24)]
        self._num_registers = self._num_prompts = 0
        self._answer = cache_pb2.RegisterResponse()
        self._call_no = self._applied = 0
        self.num_hits = 0
        self.num_sessions = 0

    def begin(self) -> None:
        """It runs from now on."""
        self._process.spawn(self._run())

    async def _run(self) -> None:
        while True:
            await self._register()
            try:
                while True:
                    await self._turn()
                    await asyncio.sleep(self._draw.choice([0.01, 0.05, 0.3]))
            except _SessionEnded:
                continue

    async def _call(self, method: str, request: Any) -> Any:
        """The answer, asked for until it comes."""
        while True:
            if hasattr(request, "uplink"):
                self._call_no += 1
                request.uplink.CopyFrom(
                    cache_pb2.Uplink(
                        session=self._answer.session, session_key=self._answer.session_key, call_no=self._call_no
                    )
                )
                request.uplink.downlink_ack = self._applied
            try:
                answer = await getattr(self._stub, method)(request, timeout=1.0)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    await asyncio.sleep(0.05)
                    continue
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise _SessionEnded from None
                raise
            self._applied = max([self._applied, *(one.number for one in answer.downlink.entries)])
            return answer

    async def _register(self) -> None:
        """With nothing in its blocks."""
        self._written: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self._live: list[_Sequence] = []
        config = common_pb2.KVCacheConfig(block_size=BLOCK_SIZE)
        config.groups.add(group=0).full_attention.SetInParent()
        config.groups.add(group=1).cross_attention.SetInParent()
        for group, num_blocks in enumerate(NUM_BLOCKS):
            config.pools.add(group=group, tier=common_pb2.TIER_DEVICE, num_blocks=num_blocks)
        while True:
            self._num_registers += 1
            request = cache_pb2.RegisterRequest(
                worker_id=FINGERPRINT,
                incarnation=1,
                register_no=self._num_registers,
                model_fingerprint=FINGERPRINT,
                kv_cache_config=config,
            )
            try:
                answer = await self._stub.Register(request, timeout=1.0)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
                continue
            self._answer, self._call_no, self._applied = answer, 0, 0
            self.num_sessions += 1
            return

    async def _turn(self) -> None:
        heartbeat = cache_pb2.KeepAliveRequest(
            session=self._answer.session, session_key=self._answer.session_key, downlink_ack=self._applied
        )
        await self._call("KeepAlive", heartbeat)
        if len(self._live) < 2:
            await self._ask()
        else:
            await self._go_on(self._draw.choice(self._live))

    async def _ask(self) -> None:
        self._num_prompts += 1
        tokens = self._base[: self._draw.choice([4, 11, 16, 24])] + [9 + self._num_prompts % 5] * self._draw.randint(
            1, 5
        )
        key = common_pb2.SequenceKey(sequence_id=f"{self._num_registers}.{self._num_prompts}", attempt=1)
        request = cache_pb2.AllocateRequest()
        item = request.items.add(key=key, tokens=_encoded(tokens), max_new_tokens=1, no_wait=self._draw.random() < 0.5)
        item.root.model_fingerprint = FINGERPRINT
        (result,) = (await self._call("Allocate", request)).results
        if result.HasField("granted"):
            sequence = _Sequence(key, tokens, result.granted)
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
            free = cache_pb2.FreeRequest()
            free.items.add().update.key.CopyFrom(sequence.key)
            await self._call("Free", free)
            return
        for group, block, generation, prefix in sequence.contents(
            sequence.num_computed // BLOCK_SIZE, num_computed // BLOCK_SIZE
        ):
            self._written[group, block] = generation, prefix
        sequence.num_computed = num_computed
        append = cache_pb2.AppendRequest()
        append.items.add().update.CopyFrom(cache_pb2.SequenceUpdate(key=sequence.key, num_computed_tokens=num_computed))
        (result,) = (await self._call("Append", append)).results
        assert not result.status.code, result.status.message


def _encoded(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kind_of_the_tests_own_runs_through_the_simulator(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(groups.KINDS, SpecOnTheWire, EverySecondGroup)
    monkeypatch.setitem(group_codec.KINDS, "cross_attention", SpecOnTheWire)
    world = World(seed)
    assert not world.has_encoder, "its place on the wire is taken"
    process = Process(world, FINGERPRINT, FINGERPRINT)
    world.add_process(process)
    worker = EverySecondWorker(process, random.Random(seed))
    world.kernel.at(1.0, worker.begin)
    result = world.run()
    assert result.violation is None
    assert result.laws["conservation"] > 100
    assert worker.num_sessions > 1, "the run has faults"
    assert worker.num_hits > 20

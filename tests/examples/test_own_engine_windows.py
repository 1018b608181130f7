"""The example of an engine with a sliding window: its scratch is a ring, and what it names is hit."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest

from examples import own_engine, own_engine_windows
from examples.own_engine_windows import RING, SPAN, WINDOW, Ring
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests.cluster.cluster import Cluster
from tests.examples.engines import PROMPTS, SIZE, WINDOWS, as_text

POOLS = (64, 64)


async def test_a_long_text_keeps_no_more_of_the_window_than_a_short_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[int, int]] = []
    turn = Ring.turn

    def counting(ring: Ring, first: int, end: int) -> None:
        turn(ring, first, end)
        held.append((len(ring.placed) + len(ring.free), len(ring.named)))

    monkeypatch.setattr(Ring, "turn", counting)
    engine = await WINDOWS.registered(cluster, cluster.manager_stub, *POOLS)
    _, _, table, _ = await engine.generate(PROMPTS[0], 300)
    assert len(table) > 5 * RING
    assert {num_scratch for num_scratch, _ in held} == {RING}
    assert max(num_named for _, num_named in held) == SPAN
    assert held[-1] == (RING, 0)


async def test_a_conversation_goes_on_from_the_end_of_its_text(cluster: Cluster) -> None:
    """The window there is named with Free; a prompt that leaves the text before it finds nothing but the window of the prompt."""
    engine = await WINDOWS.registered(cluster, cluster.manager_stub, *POOLS)
    prompt = PROMPTS[0][-40:]
    tokens, *_ = await engine.generate(prompt, 40)
    text = as_text(tokens.tolist())
    *_, cached = await engine.generate(f"{text} and more", 8)
    assert cached == [(len(text) - 1) // SIZE * SIZE]
    *_, cached = await engine.generate(f"{text[: len(prompt) + 20]} no more", 8)
    assert cached == [(len(prompt) - 1) // SIZE * SIZE]


class Told(NamedTuple):
    """What one call says of a text in group 1."""

    call: str
    num_computed_tokens: int
    bound: list[int]
    num_scratch: int
    released: list[int]


class ListeningStub:
    """The real service; what is stated of one text is written down."""

    def __init__(self, stub: cache_pb2_grpc.CacheServiceStub, prompt: str) -> None:
        self._stub, self._prompt = stub, prompt
        self.told: list[Told] = []

    def __getattr__(self, name: str) -> Any:
        def send(request: Any, timeout: float) -> Any:
            for update in [item.update for item in request.items if name in ("Append", "Free")]:
                if update.key.sequence_id.endswith(self._prompt):
                    bound, released = _entries(update.bound), _entries(update.released)
                    self.told.append(
                        Told(name, update.num_computed_tokens, bound, len(_entries(update.scratch)), released)
                    )
            return getattr(self._stub, name)(request, timeout=timeout)

        return send


def _entries(runs: Iterable[common_pb2.BlockRun]) -> list[int]:
    return [run.start_index for run in runs if run.group == 1]


async def test_the_example_shows_what_it_states_of_a_text(cluster: Cluster) -> None:
    text = own_engine_windows.__doc__ or ""
    rows = re.findall(r"^\| (Append|Free) (\d+) \| ([\d, ]*)\| (\d) \| ([\d, ]*)\|", text, re.MULTILINE)
    shown = [
        Told(call, int(computed), _numbers(bound), int(num_scratch), _numbers(released))
        for call, computed, bound, num_scratch, released in rows
    ]
    assert len(shown) == 10
    stub = ListeningStub(cluster.manager_stub, PROMPTS[0])
    engine = await WINDOWS.registered(cluster, stub, *POOLS)
    first, other = await asyncio.gather(*(engine.generate(prompt, 40) for prompt in (PROMPTS[0], PROMPTS[2])))
    assert stub.told == shown
    assert (first[3], other[3]) == ([0], [56])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_ring_has_room_for_every_step_and_never_gives_away_what_the_step_sees() -> None:
    draw = np.random.default_rng(1)
    for _ in range(200):
        pool = own_engine.Blocks(32)
        run = common_pb2.BlockRun(group=1, block_ids=range(1, RING + 1), generations=[1] * RING)
        ring = Ring(pool, pb.Granted(scratch=[run]), 100)
        holds: dict[int, int] = {}
        computed = 0
        while computed < 200:
            until = computed + int(draw.integers(1, own_engine_windows.CHUNK + 1))
            ring.turn(computed, until)
            for position in range(computed, until):
                holds[int(ring.table[position // SIZE]) * SIZE + position % SIZE] = position
            for position in range(max(0, computed - WINDOW + 1), until):
                assert holds[int(ring.table[position // SIZE]) * SIZE + position % SIZE] == position
            computed = until

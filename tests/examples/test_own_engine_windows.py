"""The example of an engine with a sliding window: its texts are those of the model, and what it names is hit."""

from __future__ import annotations

import asyncio
import functools
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest

from examples import own_engine, own_engine_windows
from examples.own_engine_windows import RING, SPAN, WINDOW, Engine, Ring
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests.cluster.cluster import Cluster
from tests.examples.engines import ForgetfulStub, Start, as_text, assert_nothing_is_left, dense, texts_of

PROMPTS, SIZE = own_engine.PROMPTS, own_engine.SIZE
JUNCTION = len(own_engine.STORY) // SIZE * SIZE
"""Tokens up to which the prompts are the same, in whole blocks."""
NUM_WINDOW_BLOCKS_FOR_ONE = RING + SPAN + 1
"""With the null block: room for the ring of one text, and for a window that it hits."""


# -- the truth


TRUTH = {prompt: dense(prompt, 40, (math.inf, WINDOW)) for prompt in PROMPTS}


# -- the program


@pytest.fixture
def start(start_engine: Start) -> Start:
    """Starts the program with a manager's address and flags."""
    return functools.partial(start_engine, ["-m", "examples.own_engine_windows"])


async def test_its_texts_are_those_of_the_model_and_the_second_prompt_hits_where_it_parts(
    cluster: Cluster, start: Start
) -> None:
    """The first is told where the others leave it, while it computes, and names the window there."""
    engine = start(cluster.address())
    assert await engine.ended() == 0, engine.log
    texts = texts_of(engine.log)
    assert [(text.prompt, text.text) for text in texts] == [
        (prompt, as_text(TRUTH[prompt][0][len(prompt) :])) for prompt in PROMPTS
    ], engine.log
    assert sorted(text.cached for text in texts)[0] == [0]
    assert all(text.cached[0] >= JUNCTION for text in texts if text.cached != [0])
    assert sum(text.cached == [0] for text in texts) == 1
    assert {tuple(text.table[: JUNCTION // SIZE]) for text in texts} == {tuple(texts[0].table[: JUNCTION // SIZE])}
    await assert_nothing_is_left(cluster)


async def test_what_can_never_fit_is_said_with_the_figures(cluster: Cluster, start: Start) -> None:
    engine = start(cluster.address(), num_window_blocks=NUM_WINDOW_BLOCKS_FOR_ONE - 1)
    assert await engine.ended() == 1
    assert f"needs {RING + SPAN} of group 1, {RING} as scratch and {SPAN} in a window that it hits" in engine.log
    await assert_nothing_is_left(cluster)


# -- the engine, in this process


async def registered(cluster: Cluster, stub: Any, num_blocks: int = 64, num_window_blocks: int = 64) -> Engine:
    config = common_pb2.KVCacheConfig(block_size=SIZE)
    config.groups.add(full_attention=common_pb2.FullAttentionSpec())
    config.groups.add(group=1, sliding_window=common_pb2.SlidingWindowSpec(window_tokens=WINDOW, ring_blocks=RING))
    for group, count in enumerate((num_blocks, num_window_blocks)):
        config.pools.add(group=group, tier=common_pb2.TIER_DEVICE, num_blocks=count)
    hello = pb.RegisterRequest(worker_id="here", incarnation=1, register_no=1, kv_cache_config=config)
    hello.model_fingerprint = own_engine_windows.ROOT.model_fingerprint
    return Engine(stub, await cluster.manager_stub.Register(hello), num_blocks, num_window_blocks)


async def assert_engine_is_true(cluster: Cluster, engine: Engine) -> list[list[int]]:
    """All texts and logits at once, and the pools afterwards; returns the cached tokens of each round of each text."""
    texts = await asyncio.gather(*(engine.generate(prompt, 40) for prompt in PROMPTS))
    for prompt, (tokens, logits, _, _) in zip(PROMPTS, texts, strict=True):
        expected_tokens, expected_logits = TRUTH[prompt]
        assert tokens.tolist() == expected_tokens
        np.testing.assert_allclose(logits, expected_logits, rtol=1e-9)
    full, windows = (await cluster.worker("here")).counts
    assert full.free + full.cached == full.capacity
    assert windows.free + windows.cached + windows.reserved == windows.capacity
    assert not engine.blocks.users.any()
    assert np.flatnonzero(engine.windows.users).tolist() == sorted(engine.reserve), "a block is held by no text"
    assert list((await cluster.manager_stub.Check(pb.CheckRequest())).violations) == []
    return [cached for _, _, _, cached in texts]


@pytest.mark.parametrize(
    ("num_blocks", "num_window_blocks"), [(64, 64), (64, NUM_WINDOW_BLOCKS_FOR_ONE), (24, 20), (17, 64)]
)
async def test_logits_are_those_of_the_model_whatever_pool_is_short(
    cluster: Cluster, num_blocks: int, num_window_blocks: int
) -> None:
    """Rings are turned, windows named, evicted and hit; texts give their blocks back and go on."""
    engine = await registered(cluster, cluster.manager_stub, num_blocks, num_window_blocks)
    await assert_engine_is_true(cluster, engine)
    assert ((await cluster.worker("here")).totals.num_evicted_blocks > 0) == (num_blocks + num_window_blocks < 128)


@pytest.mark.parametrize("num_window_blocks", [64, NUM_WINDOW_BLOCKS_FOR_ONE])
async def test_lost_answers_change_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, num_window_blocks: int
) -> None:
    """What was executed twice under two numbers was done once."""
    nap = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: nap(min(seconds, 0.001)))
    stub = ForgetfulStub(cluster.manager_stub)
    engine = await registered(cluster, stub, num_window_blocks=num_window_blocks)
    await assert_engine_is_true(cluster, engine)
    assert (await cluster.worker("here")).totals.num_calls == stub.num_sent > 60


async def test_a_long_text_keeps_no_more_of_the_window_than_a_short_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scratch is the ring, and of what it has named it keeps a window at most."""
    held: list[tuple[int, int]] = []
    turn = Ring.turn

    def counting(ring: Ring, first: int, end: int) -> None:
        turn(ring, first, end)
        held.append((len(ring.placed) + len(ring.free), len(ring.named)))

    monkeypatch.setattr(Ring, "turn", counting)
    engine = await registered(cluster, cluster.manager_stub)
    _, _, table, _ = await engine.generate(PROMPTS[0], 300)
    assert len(table) > 5 * RING
    assert {num_scratch for num_scratch, _ in held} == {RING}
    assert max(num_named for _, num_named in held) == SPAN
    assert held[-1] == (RING, 0)


async def test_a_conversation_goes_on_from_the_end_of_its_text(cluster: Cluster) -> None:
    """The window there is named with Free; a prompt that leaves the text before it finds nothing but the window of the prompt."""
    engine = await registered(cluster, cluster.manager_stub)
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
    """The table at its head, and the hit that it promises to the other prompt."""
    text = own_engine_windows.__doc__ or ""
    rows = re.findall(r"^\| (Append|Free) (\d+) \| ([\d, ]*)\| (\d) \| ([\d, ]*)\|", text, re.MULTILINE)
    shown = [
        Told(call, int(computed), _numbers(bound), int(num_scratch), _numbers(released))
        for call, computed, bound, num_scratch, released in rows
    ]
    assert len(shown) == 10
    stub = ListeningStub(cluster.manager_stub, PROMPTS[0])
    engine = await registered(cluster, stub)
    first, other = await asyncio.gather(*(engine.generate(prompt, 40) for prompt in (PROMPTS[0], PROMPTS[2])))
    assert stub.told == shown
    assert (first[3], other[3]) == ([0], [56])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_ring_has_room_for_every_step_and_never_gives_away_what_the_step_sees() -> None:
    """Beginning at any place, with steps of any length up to a chunk."""
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

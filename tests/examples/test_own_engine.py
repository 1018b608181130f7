"""The example of an engine of one's own: its texts are those of a model without a cache, and it respects the protocol."""

from __future__ import annotations

import ast
import asyncio
import functools
import re
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import own_engine
from kvpool.cli.app import main
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import common_pb2
from tests.client.fakes import FakeWorker, serving
from tests.cluster.cluster import Cluster
from tests.cluster.polling import eventually
from tests.examples.engines import ForgetfulStub, Start, Text, as_text, assert_nothing_is_left, dense, texts_of

SCRIPT = Path(own_engine.__file__)
PROMPTS = own_engine.PROMPTS
NUM_BLOCKS_FOR_ONE = 17
"""Blocks that the longest text needs, and the null block: not enough for two of them."""
ENDLESS = 10_000
NUM_BLOCKS_FOR_ENDLESS = 1_300


# -- the truth


TRUTH = {prompt: dense(prompt, 40) for prompt in PROMPTS}


# -- the program


@pytest.fixture
def start(start_engine: Start) -> Start:
    """Starts the program with a manager's address and flags."""
    return functools.partial(start_engine, [str(SCRIPT)])


async def test_who_names_no_model_is_answered_by_the_one_that_serves_text(
    cluster: Cluster, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine without an address is not asked, and its model cannot be."""

    async def generate(*flags: str) -> object:
        with pytest.raises(SystemExit) as caught:
            await asyncio.to_thread(main, ["generate", "the", "--manager", cluster.address(), *flags])
        return caught.value.code or 0

    engine = start(cluster.address(), num_blocks=NUM_BLOCKS_FOR_ENDLESS, max_tokens=ENDLESS)
    await until_it_generates(cluster)
    worker = FakeWorker("text")
    async with serving(worker):
        hello = registration("text", num_blocks=9)
        hello.address, hello.model_fingerprint = worker.address, worker.model.fingerprint
        await cluster.manager_stub.Register(hello)
        assert (await generate(), capsys.readouterr().out) == (0, " the cat sat\n")
        assert await generate("--model", own_engine.ROOT.model_fingerprint) == 1
        assert "no live worker serves the model 'own-engine-1'" in capsys.readouterr().err
        assert engine.status is None


async def until_it_generates(cluster: Cluster) -> pb.WorkerDescription:
    async def generates() -> list[pb.WorkerDescription]:
        return [worker for worker in await cluster.describe() if worker.num_sequences and worker.totals.num_calls > 20]

    return (await eventually(generates, "the engine generates"))[0]


def assert_true(output: str) -> list[Text]:
    """Every text is what the model says without a cache."""
    texts = texts_of(output)
    assert [(text.prompt, text.text) for text in texts] == [
        (prompt, as_text(TRUTH[prompt][0][len(prompt) :])) for prompt in PROMPTS
    ], output
    return texts


async def test_its_texts_are_those_of_the_model_and_their_beginning_is_shared(cluster: Cluster, start: Start) -> None:
    engine = start(cluster.address())
    assert await engine.ended() == 0, engine.log
    texts = assert_true(engine.log)
    num_shared = len(own_engine.STORY) // own_engine.SIZE
    assert sorted(text.cached for text in texts)[0] == [0]
    assert all(text.cached[0] >= num_shared * own_engine.SIZE for text in texts if text.cached != [0])
    assert sum(text.cached == [0] for text in texts) == 1
    assert {tuple(text.table[:num_shared]) for text in texts} == {tuple(texts[0].table[:num_shared])}
    assert all(
        len(text.table) == -(-(len(text.prompt) + 40 - 1) // own_engine.SIZE) and 0 not in text.table for text in texts
    )
    await assert_nothing_is_left(cluster)


async def test_a_pool_for_hardly_more_than_one_text_gives_the_same_texts(cluster: Cluster, start: Start) -> None:
    engine = start(cluster.address(), num_blocks=NUM_BLOCKS_FOR_ONE)
    assert await engine.ended() == 0, engine.log
    texts = assert_true(engine.log)
    assert max(len(text.cached) for text in texts) > 1, "nobody had to give its blocks back"
    await assert_nothing_is_left(cluster)


async def test_two_engines_at_once_do_not_disturb_each_other(cluster: Cluster, start: Start) -> None:
    engines = [start(cluster.address(), num_blocks=NUM_BLOCKS_FOR_ONE + 3) for _ in range(2)]
    for engine in engines:
        assert await engine.ended() == 0, engine.log
        assert_true(engine.log)
    await assert_nothing_is_left(cluster)


async def test_a_manager_that_dies_is_named_in_one_line(cluster: Cluster, start: Start) -> None:
    engine = start(cluster.address(), num_blocks=NUM_BLOCKS_FOR_ENDLESS, max_tokens=ENDLESS)
    await until_it_generates(cluster)
    cluster.kill("manager")
    assert await engine.ended() == 1
    assert re.fullmatch(r"own_engine: .*(connect|Connection|Socket|recvmsg|sendmsg|pipe|Deadline).*\n", engine.log), (
        engine.log
    )


async def test_no_manager_at_all_is_named_in_one_line(start: Start) -> None:
    engine = start("127.0.0.1:1")
    assert await engine.ended() == 1
    assert re.fullmatch(r"own_engine: .*127\.0\.0\.1:1.*\n", engine.log), engine.log


async def test_a_session_that_was_fenced_ends_it_with_the_reason(cluster: Cluster, start: Start) -> None:
    engine = start(cluster.address(), num_blocks=NUM_BLOCKS_FOR_ENDLESS, max_tokens=ENDLESS)
    fenced = await until_it_generates(cluster)
    rival = registration(fenced.worker_id, 2)
    rival.incarnation, rival.register_no = fenced.incarnation, 2  # as if it had registered again
    await cluster.manager_stub.Register(rival)
    assert await engine.ended() == 1
    assert re.fullmatch(r"own_engine: session 0x[0-9a-f]+ is not live: it was fenced, .*\n", engine.log), engine.log


async def test_an_interrupt_ends_it_and_gives_everything_back(cluster: Cluster, start: Start) -> None:
    engine = start(cluster.address(), num_blocks=NUM_BLOCKS_FOR_ENDLESS, max_tokens=ENDLESS)
    await until_it_generates(cluster)
    engine.send(signal.SIGINT)
    assert await engine.ended() == 1
    assert engine.log == "own_engine: interrupted\n"
    await assert_nothing_is_left(cluster)


async def test_it_keeps_its_lease(tmp_path: Path, start: Start) -> None:
    async with Cluster(tmp_path, lease_seconds=3, keep_alive_seconds=0.1) as cluster:
        await cluster.start_manager()
        engine = start(cluster.address(), num_blocks=NUM_BLOCKS_FOR_ENDLESS, max_tokens=ENDLESS)
        remaining = [(await until_it_generates(cluster)).lease_remaining_ms]

        async def renewed_twice() -> bool:
            workers = await cluster.describe()
            assert workers, f"the lease ran out: {engine.log}"
            remaining.append(workers[0].lease_remaining_ms)
            return sum(later > earlier for earlier, later in pairwise(remaining)) >= 2

        await eventually(renewed_twice, "the lease is renewed")


async def test_what_can_never_fit_is_said_with_the_figures(cluster: Cluster, start: Start) -> None:
    engine = start(cluster.address(), num_blocks=5)
    assert await engine.ended() == 1
    assert re.fullmatch(r"own_engine: 72 prompt tokens and up to 40 new ones need 14 blocks.*\n", engine.log)
    await assert_nothing_is_left(cluster)


# -- the engine, in this process


def registration(worker_id: str, num_blocks: int) -> pb.RegisterRequest:
    group = common_pb2.KVCacheGroup(full_attention=common_pb2.FullAttentionSpec())
    pool = common_pb2.KVCachePool(tier=common_pb2.TIER_DEVICE, num_blocks=num_blocks)
    return pb.RegisterRequest(
        worker_id=worker_id,
        incarnation=1,
        register_no=1,
        address="127.0.0.1:1",
        model_fingerprint=own_engine.ROOT.model_fingerprint,
        kv_cache_config=common_pb2.KVCacheConfig(block_size=own_engine.SIZE, groups=[group], pools=[pool]),
    )


async def registered(cluster: Cluster, stub: Any, num_blocks: int) -> own_engine.Engine:
    answer = await cluster.manager_stub.Register(registration("here", num_blocks))
    return own_engine.Engine(stub, answer, num_blocks)


async def assert_engine_is_true(cluster: Cluster, engine: own_engine.Engine) -> list[list[int]]:
    """All texts and logits at once, and the pool afterwards; returns the cached tokens of each round of each text."""
    texts = await asyncio.gather(*(engine.generate(prompt, 40) for prompt in PROMPTS))
    for prompt, (tokens, logits, _, _) in zip(PROMPTS, texts, strict=True):
        expected_tokens, expected_logits = TRUTH[prompt]
        assert tokens.tolist() == expected_tokens
        np.testing.assert_allclose(logits, expected_logits, rtol=1e-9)
    (counts,) = (await cluster.worker("here")).counts
    assert counts.free + counts.cached == counts.capacity
    assert counts.cached > 0
    assert not engine.blocks.users.any()
    assert list((await cluster.manager_stub.Check(pb.CheckRequest())).violations) == []
    return [cached for _, _, _, cached in texts]


@pytest.mark.parametrize("num_blocks", [64, 24, NUM_BLOCKS_FOR_ONE])
async def test_logits_depend_on_every_slot_and_are_those_of_the_model(cluster: Cluster, num_blocks: int) -> None:
    """Also where blocks are evicted, taken back and computed again."""
    engine = await registered(cluster, cluster.manager_stub, num_blocks)
    await assert_engine_is_true(cluster, engine)
    assert ((await cluster.worker("here")).totals.num_evicted_blocks > 0) == (num_blocks < 64)


async def test_what_is_cached_is_not_computed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    forward = own_engine.forward

    def counting(kv: Any, table: Any, tokens: Any, first: int) -> Any:
        computed.append(len(tokens) - first)
        return forward(kv, table, tokens, first)

    monkeypatch.setattr(own_engine, "forward", counting)
    cached = await assert_engine_is_true(cluster, await registered(cluster, cluster.manager_stub, 64))
    num_needed = sum(len(prompt) + 39 for prompt in PROMPTS)
    assert sum(computed) == num_needed - sum(map(sum, cached))
    assert sum(computed) < num_needed - 3 * 50


@pytest.mark.parametrize("num_blocks", [64, NUM_BLOCKS_FOR_ONE])
async def test_lost_answers_change_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    """What was executed twice under two numbers was done once."""
    nap = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: nap(min(seconds, 0.001)))
    stub = ForgetfulStub(cluster.manager_stub)
    await assert_engine_is_true(cluster, await registered(cluster, stub, num_blocks))
    assert (await cluster.worker("here")).totals.num_calls == stub.num_sent > 60


async def test_texts_that_live_elsewhere_under_a_larger_attempt_end(cluster: Cluster) -> None:
    engine = await registered(cluster, cluster.manager_stub, NUM_BLOCKS_FOR_ENDLESS)
    generating = asyncio.gather(*(engine.generate(prompt, ENDLESS) for prompt in PROMPTS))

    async def all_live() -> bool:
        return (await cluster.worker("here")).num_sequences == len(PROMPTS)

    await eventually(all_live, "all texts have tables")
    other = await cluster.manager_stub.Register(registration("elsewhere", 64))
    names = [f"{engine.uplink.session:x} {prompt}" for prompt in PROMPTS]
    items = [
        pb.AllocateItem(
            key=common_pb2.SequenceKey(sequence_id=name, attempt=2),
            root=own_engine.ROOT,
            tokens=b"\0" * 4,
            no_wait=True,
        )
        for name in names
    ]
    taken = await cluster.manager_stub.Allocate(
        pb.AllocateRequest(
            uplink=pb.Uplink(session=other.session, session_key=other.session_key, call_no=1), items=items
        )
    )
    assert all(result.HasField("granted") for result in taken.results)
    await generating
    assert engine.stopped == {*names}
    assert (await cluster.worker("here")).num_sequences == 0
    alive = await cluster.manager_stub.KeepAlive(pb.KeepAliveRequest(**engine.who))
    assert list(alive.downlink.entries) == [], "not acknowledged"


def run(blocks: list[int], generations: list[int]) -> common_pb2.BlockRun:
    return common_pb2.BlockRun(tier=common_pb2.TIER_DEVICE, block_ids=blocks, generations=generations)


@pytest.mark.parametrize(
    ("blocks", "generations", "num_hits"),
    [
        pytest.param([2], [9], 0, id="granted although in use"),
        pytest.param([3], [5], 0, id="granted under its old stamp"),
        pytest.param([3], [4], 0, id="granted under an older stamp"),
        pytest.param([3], [5], 1, id="handed out as cached, and not filled"),
        pytest.param([4], [7], 1, id="handed out as cached under another stamp"),
        pytest.param([5], [5], 1, id="handed out as cached, filled before it was granted again"),
    ],
)
def test_a_block_that_may_not_be_written_or_read_ends_the_engine(
    blocks: list[int], generations: list[int], num_hits: int
) -> None:
    pool = own_engine.Blocks(8)
    pool.enter(run([2, 3, 4, 5], [5, 5, 6, 5]))
    pool.filled[4] = 6
    pool.filled[5] = 5
    pool.users[[3, 4, 5]] = 0
    pool.enter(run([5], [8]))
    pool.users[5] = 0
    assert pool.enter(run([4], [6]), 1).tolist() == [4]
    with pytest.raises(RuntimeError, match="disagree"):
        pool.enter(run(blocks, generations), num_hits)


# -- the file


def test_it_is_short_and_needs_nothing_but_the_base_package_and_numpy() -> None:
    source = SCRIPT.read_text()
    assert len(source.splitlines()) < 190
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            imported.add(node.module)
    foreign = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign == {"grpc", "numpy", "kvpool.v1"}

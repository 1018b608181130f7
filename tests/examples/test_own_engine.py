"""The examples of engines of one's own: their texts are those of their models without a cache, and they respect the protocol."""

from __future__ import annotations

import ast
import asyncio
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from examples import own_engine
from examples.own_engine_windows import RING, SPAN
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import common_pb2
from tests.client.commands import kvpool
from tests.client.fakes import FakeWorker, serving
from tests.cluster.cluster import Cluster
from tests.cluster.process import Process
from tests.examples.engines import (
    NUM_SHARED_BLOCKS,
    PLAIN,
    PROMPTS,
    SIZE,
    WINDOWS,
    Example,
    ForgetfulStub,
    Start,
    assert_nothing_is_left,
)
from tests.until import eventually

NUM_BLOCKS_FOR_ONE = 17
"""Blocks that the longest text needs, and the null block: not enough for two of them."""
NUM_WINDOW_BLOCKS_FOR_ONE = RING + SPAN + 1
"""With the null block: room for the ring of one text, and for a window that it hits."""
ENDLESS = 10_000
NUM_BLOCKS_FOR_ENDLESS = 1_300


# -- the programs


@pytest.mark.parametrize("example", [PLAIN, WINDOWS], ids=["plain", "windows"])
async def test_texts_are_those_of_the_model_and_their_beginning_is_shared(
    cluster: Cluster, start: Start, example: Example
) -> None:
    """With a window the first text is told where the others leave it, while it computes, and names the window there."""
    engine = start(example, cluster.address())
    assert await engine.ended() == 0, engine.log
    texts = example.check_program(engine.log)
    assert sum(text.cached == [0] for text in texts) == 1
    assert all(text.cached[0] >= NUM_SHARED_BLOCKS * SIZE for text in texts if text.cached != [0])
    assert len({tuple(text.table[:NUM_SHARED_BLOCKS]) for text in texts}) == 1
    assert all(len(text.table) == -(-(len(text.prompt) + 40 - 1) // SIZE) and 0 not in text.table for text in texts)
    await assert_nothing_is_left(cluster)


@pytest.mark.parametrize(
    ("example", "settings", "words"),
    [
        (PLAIN, {"num_blocks": 5}, "72 prompt tokens and up to 40 new ones need 14 blocks"),
        (
            WINDOWS,
            {"num_window_blocks": NUM_WINDOW_BLOCKS_FOR_ONE - 1},
            f"needs {RING + SPAN} of group 1, {RING} as scratch and {SPAN} in a window that it hits",
        ),
    ],
    ids=["plain", "windows"],
)
async def test_what_can_never_fit_is_said_with_the_figures(
    cluster: Cluster, start: Start, example: Example, settings: dict[str, int], words: str
) -> None:
    engine = start(example, cluster.address(), **settings)
    assert await engine.ended() == 1
    assert re.fullmatch(f"own_engine: .*{words}.*\n", engine.log), engine.log
    await assert_nothing_is_left(cluster)


async def test_who_names_no_model_is_answered_by_the_one_that_serves_text(
    cluster: Cluster, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = ("generate", "the", "--manager", cluster.address())
    engine, _ = await endless(cluster, start)
    worker = FakeWorker("text")
    async with serving(worker):
        hello = PLAIN.registration("text", 9)
        hello.address, hello.model_fingerprint = worker.address, worker.model.fingerprint
        await cluster.manager_stub.Register(hello)
        assert (await kvpool(*generate), capsys.readouterr().out) == (0, " the cat sat\n")
        assert await kvpool(*generate, "--model", own_engine.ROOT.model_fingerprint) == 1
        assert "no live worker serves the model 'own-engine-1'" in capsys.readouterr().err
        assert engine.status is None


async def endless(cluster: Cluster, start: Start) -> tuple[Process, pb.WorkerDescription]:
    """The program in the middle of texts that do not end."""
    engine = start(PLAIN, cluster.address(), num_blocks=NUM_BLOCKS_FOR_ENDLESS, max_tokens=ENDLESS)

    async def generates() -> list[pb.WorkerDescription]:
        return [worker for worker in await cluster.describe() if worker.num_sequences and worker.totals.num_calls > 20]

    return engine, (await eventually(generates, "the engine generates"))[0]


async def test_two_engines_at_once_do_not_disturb_each_other(cluster: Cluster, start: Start) -> None:
    engines = [start(PLAIN, cluster.address(), num_blocks=NUM_BLOCKS_FOR_ONE + 3) for _ in range(2)]
    for engine in engines:
        assert await engine.ended() == 0, engine.log
        PLAIN.check_program(engine.log)
    await assert_nothing_is_left(cluster)


async def no_manager_any_more(cluster: Cluster, engine: Process, worker: pb.WorkerDescription) -> None:
    cluster.kill("manager")


async def fenced(cluster: Cluster, engine: Process, worker: pb.WorkerDescription) -> None:
    rival = PLAIN.registration(worker.worker_id, 2)
    rival.incarnation, rival.register_no = worker.incarnation, 2  # as if it had registered again
    await cluster.manager_stub.Register(rival)


async def interrupted(cluster: Cluster, engine: Process, worker: pb.WorkerDescription) -> None:
    engine.send(signal.SIGINT)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (no_manager_any_more, r".*(connect|Connection|Socket|recvmsg|sendmsg|pipe|Deadline).*"),
        (fenced, r"session 0x[0-9a-f]+ is not live: it was fenced, .*"),
        (interrupted, "interrupted"),
    ],
)
async def test_what_ends_it_is_named_in_one_line(
    cluster: Cluster, start: Start, harm: Callable[..., Awaitable[None]], words: str
) -> None:
    engine, worker = await endless(cluster, start)
    await harm(cluster, engine, worker)
    assert await engine.ended() == 1
    assert re.fullmatch(f"own_engine: {words}\n", engine.log), engine.log
    if harm is interrupted:
        await assert_nothing_is_left(cluster)


async def test_no_manager_at_all_is_named_in_one_line(start: Start) -> None:
    engine = start(PLAIN, "127.0.0.1:1")
    assert await engine.ended() == 1
    assert re.fullmatch(r"own_engine: .*127\.0\.0\.1:1.*\n", engine.log), engine.log


async def test_it_keeps_its_lease(tmp_path: Path, start: Start) -> None:
    async with Cluster(tmp_path, lease_seconds=3, keep_alive_seconds=0.1) as cluster:
        await cluster.start_manager()
        engine, worker = await endless(cluster, start)
        remaining = [worker.lease_remaining_ms]

        async def renewed_twice() -> bool:
            workers = await cluster.describe()
            assert workers, f"the lease ran out: {engine.log}"
            remaining.append(workers[0].lease_remaining_ms)
            return sum(later > earlier for earlier, later in pairwise(remaining)) >= 2

        await eventually(renewed_twice, "the lease is renewed")


# -- the engines, in this process


@pytest.mark.parametrize(
    ("example", "pools"),
    [
        *((PLAIN, (num_blocks,)) for num_blocks in (64, 24, NUM_BLOCKS_FOR_ONE)),
        *((WINDOWS, pools) for pools in ((64, 64), (64, NUM_WINDOW_BLOCKS_FOR_ONE), (24, 20), (17, 64))),
    ],
)
async def test_logits_depend_on_every_slot_and_are_those_of_the_model(
    cluster: Cluster, example: Example, pools: tuple[int, ...]
) -> None:
    rounds = await example.check_engine(cluster, await example.registered(cluster, cluster.manager_stub, *pools))
    assert pools != (NUM_BLOCKS_FOR_ONE,) or max(map(len, rounds)) > 1, "no text had to give its blocks back"
    assert ((await cluster.worker("here")).totals.num_evicted_blocks > 0) == (min(pools) < 64)


@pytest.mark.parametrize(
    ("example", "pools"),
    [(PLAIN, (64,)), (PLAIN, (NUM_BLOCKS_FOR_ONE,)), (WINDOWS, (64, 64)), (WINDOWS, (64, NUM_WINDOW_BLOCKS_FOR_ONE))],
)
async def test_lost_answers_change_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, example: Example, pools: tuple[int, ...]
) -> None:
    nap = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: nap(min(seconds, 0.001)))
    stub = ForgetfulStub(cluster.manager_stub)
    await example.check_engine(cluster, await example.registered(cluster, stub, *pools))
    assert (await cluster.worker("here")).totals.num_calls == stub.num_sent > 60


async def test_what_is_cached_is_not_computed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    forward = own_engine.forward

    def counting(kv: Any, table: Any, tokens: Any, first: int) -> Any:
        computed.append(len(tokens) - first)
        return forward(kv, table, tokens, first)

    monkeypatch.setattr(own_engine, "forward", counting)
    cached = await PLAIN.check_engine(cluster, await PLAIN.registered(cluster, cluster.manager_stub, 64))
    num_needed = sum(len(prompt) + 39 for prompt in PROMPTS)
    assert sum(computed) == num_needed - sum(map(sum, cached))
    assert sum(computed) < num_needed - 3 * 50


async def test_texts_that_live_elsewhere_under_a_larger_attempt_end(cluster: Cluster) -> None:
    engine = await PLAIN.registered(cluster, cluster.manager_stub, NUM_BLOCKS_FOR_ENDLESS)
    generating = asyncio.gather(*(engine.generate(prompt, ENDLESS) for prompt in PROMPTS))

    async def all_live() -> bool:
        return (await cluster.worker("here")).num_sequences == len(PROMPTS)

    await eventually(all_live, "all texts have tables")
    other = await cluster.manager_stub.Register(PLAIN.registration("elsewhere", 64))
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
    source = Path(own_engine.__file__).read_text()
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

"""Engines that are measured in processes of their own: what comes over the pipe, what they answer, what our cluster counts."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.our_cluster import NOT_FOR_REQUESTS, Counts, OurCluster
from bench.piped_engine import EngineFailed, PipedEngine
from kvpool.client.config import ClientConfig
from kvpool.load.arrivals import ClosedLoop
from kvpool.load.engine import EngineUnderLoad, ServedRequest
from kvpool.load.kvpool_engine import KvpoolEngine
from kvpool.load.load import run_load
from kvpool.load.workload import ChatTurn, Conversation
from kvpool.v1 import cache_pb2
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from tests.client.processes import cpu_ticks, is_alive, state
from tests.cluster.forked_children import forked_children
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, Oracle, TinyModel, make_tiny_model
from tests.until import eventually, until

SERVED = ServedRequest("counting", range(10, 100), 1000)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@asynccontextmanager
async def running(
    name: str, *arguments: str, served: ServedRequest, seconds: float = 60.0
) -> AsyncIterator[PipedEngine]:
    """An engine in a process of its own; `arguments`: those of `python -m`."""
    engine = await PipedEngine.start(name, [sys.executable, "-m", *arguments], ENVIRONMENT, served, seconds)
    try:
        yield engine
    finally:
        await engine.close()


def counting(*arguments: str, seconds: float = 60.0) -> AbstractAsyncContextManager[PipedEngine]:
    return running("counting", "tests.bench.counting_child", *arguments, served=SERVED, seconds=seconds)


class Answer(NamedTuple):
    """What an engine has answered."""

    tokens: list[int]
    cached: int | None
    """Tokens of the prompt that were cached; None: it does not say."""


async def answer(engine: EngineUnderLoad, *prompt: int, num_tokens: int = 3) -> Answer:
    deliveries = [delivery async for delivery in engine.generate(prompt, num_tokens)]
    cached = [delivery.num_cached_tokens for delivery in deliveries if delivery.num_cached_tokens is not None]
    return Answer([token for delivery in deliveries for token in delivery.token_ids], cached[-1] if cached else None)


async def test_answers_do_not_mix_and_noise_stays_out() -> None:
    async with counting() as engine:
        assert engine.facts == {"engine": "counting"}
        found = await asyncio.gather(*(answer(engine, 10, 100 * index, num_tokens=index + 1) for index in range(20)))
    assert [tokens for tokens, _ in found] == [[100 * index + 1 + k for k in range(index + 1)] for index in range(20)]


async def test_a_workload_runs_on_it() -> None:
    async with counting() as engine:
        conversations = [Conversation((ChatTurn((10, 20), 2), ChatTurn((30,), 1)))] * 3
        run = await run_load(engine, conversations, ClosedLoop(2))
    assert run.error is None
    assert len(run.complete) == run.num_planned == 6
    assert {sample.num_cached_tokens for sample in run.samples} == {0}


async def test_a_request_that_fails_says_why_and_harms_no_other() -> None:
    async with counting() as engine:
        with pytest.raises(EngineFailed, match="counting: ValueError: no such prompt"):
            await answer(engine, 1)
        assert (await answer(engine, 10, num_tokens=1)).tokens == [11]


async def test_a_request_that_is_left_is_ended_on_the_other_side() -> None:
    async with counting() as engine:
        async with aclosing(engine.generate((3,), 5)) as deliveries:
            assert (await anext(deliveries)).num_cached_tokens == 0

        async def has_ended() -> bool:
            async with aclosing(engine.generate((10,), 1)) as deliveries:
                return (await anext(deliveries)).num_cached_tokens == 1

        await eventually(has_ended, "the child hears of it")


async def test_a_process_that_ends_is_told_with_the_end_of_its_log() -> None:
    async with counting() as engine:
        waiting = asyncio.create_task(answer(engine, 3))
        await asyncio.sleep(0)
        with pytest.raises(EngineFailed, match=r"(?s)counting has ended.*out of memory"):
            await answer(engine, 2)
        with pytest.raises(EngineFailed, match="counting has ended"):
            await waiting
        with pytest.raises(EngineFailed, match="counting has ended"):
            await answer(engine, 10)


async def test_an_engine_that_does_not_start_says_why() -> None:
    for how, why in (
        ("unready", "(?s)counting has ended.*there is no model"),
        ("slow", "counting was not ready after 2 s"),
    ):
        with pytest.raises(EngineFailed, match=why):
            await counting(how, seconds=2.0 if how == "slow" else 60.0).__aenter__()


async def test_nothing_is_left_of_a_start_that_was_cancelled(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    starting = asyncio.ensure_future(counting("never", str(pid)).__aenter__())
    await until(lambda: pid.exists() and pid.read_text())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: not is_alive(int(pid.read_text())))


async def test_a_suspended_engine_does_nothing_until_it_is_resumed() -> None:
    async with counting() as engine:
        engine.suspend()
        waiting = asyncio.create_task(answer(engine, 10, num_tokens=1))
        await until(lambda: state(engine.pid) == "T")
        before = cpu_ticks(engine.pid)
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done
        assert cpu_ticks(engine.pid) == before
        engine.resume()
        assert (await waiting).tokens == [11]
        engine.suspend()


async def test_closing_ends_the_process_and_what_it_has_started(tmp_path: Path) -> None:
    async with counting("parent", str(tmp_path / "pid")) as engine:
        pids = [engine.pid, int((tmp_path / "pid").read_text())]
        assert all(is_alive(pid) for pid in pids)
    await until(lambda: not any(is_alive(pid) for pid in pids))


# -- real texts of a tiny model, token by token those of transformers


TINY = ServedRequest("tiny", range(VOCAB_SIZE), MAX_MODEL_LEN)


def flags(model: TinyModel) -> list[str]:
    """How our engine serves it."""
    return [
        *("--model", str(model.path), "--cache-dir", str(default_cache_dir()), "--dtype", "float32", "--device", "cpu"),
        *("--block-size", "4", "--num-blocks", "257"),
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "model", tokenizer=True)


@pytest.mark.slow
async def test_our_engine_without_grpc_writes_what_transformers_writes(model: TinyModel) -> None:
    arguments = ["bench.our_engine_peer", *flags(model), "--log-level", "warning"]
    async with running("ours", *arguments, served=TINY) as engine:
        assert engine.facts["engine"].startswith("kvpool ")
        found, again = [
            await asyncio.gather(
                *(answer(engine, *prompt, num_tokens=model.num_new_tokens) for prompt in model.prompts)
            )
            for _ in range(2)
        ]
    oracle = Oracle.of(model.path)
    expected = [oracle.logits(prompt, model.num_new_tokens)[0] for prompt in model.prompts]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in again] == expected
    # The second time all full blocks of a prompt are there, but for its last token.
    assert [cached for _, cached in again] == [(len(prompt) - 1) // 4 * 4 for prompt in model.prompts]


@pytest.mark.slow
async def test_transformers_continuous_batching_streams_its_tokens(model: TinyModel) -> None:
    """In bfloat16, so its tokens are its own; but they are as many as were asked for, and the same every time."""
    arguments = ["bench.transformers_peer", str(model.path), "--page-size", "16", "--num-tokens", "2048"]
    async with running("transformers", *arguments, served=TINY, seconds=90.0) as engine:
        assert engine.facts["engine"].startswith("transformers ")
        found, again = [await answer(engine, *model.prompts[0], num_tokens=8) for _ in range(2)]
        others = await asyncio.gather(*(answer(engine, *prompt, num_tokens=5) for prompt in model.prompts))
    assert found == again
    assert len(found.tokens) == 8
    assert [len(tokens) for tokens, _ in others] == [5] * len(model.prompts)


# -- the cluster that `make bench` measures


PROMPTS = [(*range(1, 17), own) for own in (20, 21, 22)]
"""A common prefix of four blocks, and a last token of their own."""
NUM_GENERATED = 6


async def run_all(cluster: OurCluster, engine: KvpoolEngine) -> Counts:
    """All prompts once, one after the other, and what was counted meanwhile."""
    before = await cluster.counts()
    conversations = [Conversation((ChatTurn(prompt, NUM_GENERATED),)) for prompt in PROMPTS]
    run = await run_load(engine, conversations, ClosedLoop(1))
    assert run.error is None
    assert len(run.complete) == 3
    return (await cluster.counts()).since(before)


@pytest.mark.slow
async def test_counts_are_of_the_requests_in_between(model: TinyModel) -> None:
    with forked_children():
        async with OurCluster(flags(model)) as cluster:
            engine = KvpoolEngine(ClientConfig(manager=cluster.address))
            try:
                cold, warm = await run_all(cluster, engine), await run_all(cluster, engine)
            finally:
                await engine.close()
            assert await cluster.manager_cpu_seconds() > 0
    for counts in (cold, warm):
        assert counts.rpcs["Route"] == 3
        assert counts.rpcs["Allocate"] >= 3
        assert counts.rpcs["Free"] >= 1
        assert not counts.rpcs.keys() & NOT_FOR_REQUESTS
    # The last token of an answer is not forwarded. The first prompt is computed, and the 16 tokens of its full blocks are hits.
    assert cold.num_forwarded_tokens == 17 + 1 + 1 + 3 * (NUM_GENERATED - 1)
    assert warm.num_forwarded_tokens == 1 + 1 + 1 + 3 * (NUM_GENERATED - 1)


@pytest.mark.slow
async def test_a_manager_can_be_alone() -> None:
    async with OurCluster(num_workers=0) as cluster:
        assert await cluster.counts() == Counts(Counter(), 0, 0)


def test_all_that_is_left_out_are_rpcs_of_the_manager() -> None:
    methods = {method.name for method in cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods}
    assert methods - NOT_FOR_REQUESTS == {"Route", "Allocate", "Append", "Free", "Report", "Fork"}
    assert methods > NOT_FOR_REQUESTS

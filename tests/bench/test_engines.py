"""Engines that are measured in processes of their own: what comes over the pipe, what they answer, what our cluster counts."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

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
from tests.client.processes import is_alive, state
from tests.cluster.forked_children import forked_children
from tests.cluster.polling import eventually
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, Oracle, TinyModel, make_tiny_model
from tests.until import until

SERVED = ServedRequest("counting", range(10, 100), 1000)


async def start(*arguments: str, seconds: float = 60.0) -> PipedEngine:
    command = [sys.executable, "-m", "tests.bench.counting_child", *arguments]
    return await PipedEngine.start("counting", command, {}, SERVED, seconds)


@asynccontextmanager
async def counting() -> AsyncIterator[PipedEngine]:
    engine = await start()
    try:
        yield engine
    finally:
        await engine.close()


def cpu_ticks(pid: int) -> int:
    """CPU time that a process has used, in ticks of the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def answer(engine: PipedEngine, *prompt: int, num_tokens: int = 3) -> list[int]:
    return [token async for delivery in engine.generate(prompt, num_tokens) for token in delivery.token_ids]


async def test_answers_do_not_mix_and_noise_stays_out() -> None:
    async with counting() as engine:
        assert engine.facts == {"engine": "counting"}
        found = await asyncio.gather(*(answer(engine, 10, 100 * index, num_tokens=index + 1) for index in range(20)))
    assert found == [[100 * index + 1 + k for k in range(index + 1)] for index in range(20)]


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
        assert await answer(engine, 10, num_tokens=1) == [11]


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
    with pytest.raises(EngineFailed, match=r"(?s)counting has ended.*there is no model"):
        await start("unready")
    with pytest.raises(EngineFailed, match="counting was not ready after 2 s"):
        await start("slow", seconds=2.0)


async def test_nothing_is_left_of_a_start_that_was_cancelled(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    starting = asyncio.create_task(start("never", str(pid)))
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
        assert await waiting == [11]
        engine.suspend()


async def test_closing_ends_the_process_and_what_it_has_started(tmp_path: Path) -> None:
    engine = await start("parent", str(tmp_path / "pid"))
    pids = [engine.pid, int((tmp_path / "pid").read_text())]
    assert all(is_alive(pid) for pid in pids)
    await engine.close()
    await until(lambda: not any(is_alive(pid) for pid in pids))


# -- real texts of a tiny model, token by token those of transformers


TINY = ServedRequest("tiny", range(VOCAB_SIZE), MAX_MODEL_LEN)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


async def answer_of(engine: EngineUnderLoad, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], int | None]:
    """The tokens, and what was cached."""
    tokens: list[int] = []
    cached: int | None = None
    async for delivery in engine.generate(prompt, num_tokens):
        tokens += delivery.token_ids
        cached = delivery.num_cached_tokens if delivery.num_cached_tokens is not None else cached
    return tokens, cached


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "model", tokenizer=True)


@pytest.mark.slow
async def test_our_engine_without_grpc_tells_what_transformers_tells(model: TinyModel) -> None:
    command = [
        *(sys.executable, "-m", "bench.our_engine_peer", "--model", str(model.path), "--dtype", "float32"),
        *("--device", "cpu", "--block-size", "4", "--num-blocks", "257", "--cache-dir", str(default_cache_dir())),
        *("--log-level", "warning"),
    ]
    engine = await PipedEngine.start("ours", command, ENVIRONMENT, TINY, 60.0)
    try:
        assert engine.facts["engine"].startswith("kvpool ")
        found = await asyncio.gather(*(answer_of(engine, prompt, model.num_new_tokens) for prompt in model.prompts))
        again = await asyncio.gather(*(answer_of(engine, prompt, model.num_new_tokens) for prompt in model.prompts))
    finally:
        await engine.close()
    oracle = Oracle.of(model.path)
    expected = [oracle.logits(prompt, model.num_new_tokens)[0] for prompt in model.prompts]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in again] == expected
    # The second time all full blocks of a prompt are there, but for its last token.
    assert [cached for _, cached in again] == [(len(prompt) - 1) // 4 * 4 for prompt in model.prompts]


@pytest.mark.slow
async def test_transformers_continuous_batching_streams_its_tokens(model: TinyModel) -> None:
    """In bfloat16, so its tokens are its own; but they are as many as were asked for, and the same every time."""
    command = [
        *(sys.executable, "-m", "bench.transformers_peer", str(model.path)),
        *("--page-size", "16", "--num-tokens", "2048"),
    ]
    engine = await PipedEngine.start("transformers", command, ENVIRONMENT, TINY, 90.0)
    try:
        assert engine.facts["engine"].startswith("transformers ")
        found = [await answer_of(engine, model.prompts[0], 8) for _ in range(2)]
        counts = await asyncio.gather(*(answer_of(engine, prompt, 5) for prompt in model.prompts))
    finally:
        await engine.close()
    assert found[0] == found[1]
    assert len(found[0][0]) == 8
    assert [len(tokens) for tokens, _ in counts] == [5] * len(model.prompts)


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
async def test_counts_are_of_the_requests_in_between(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model", tokenizer=True)
    arguments = [
        *("--dtype", "float32", "--device", "cpu", "--block-size", "4", "--num-blocks", "257"),
        *("--model", str(model.path), "--cache-dir", str(default_cache_dir())),
    ]
    with forked_children():
        async with OurCluster(arguments) as cluster:
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

"""The cluster that `make bench` measures, with a tiny model: what its processes count is what was done."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.our_cluster import NOT_FOR_REQUESTS, Counts, OurCluster
from kvpool.client.config import ClientConfig
from kvpool.load.arrivals import ClosedLoop
from kvpool.load.kvpool_engine import KvpoolEngine
from kvpool.load.load import run_load
from kvpool.load.workload import ChatTurn, Conversation
from kvpool.v1 import cache_pb2
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from tests.cluster.forked_children import forked_children
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

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


async def test_a_manager_can_be_alone() -> None:
    async with OurCluster(num_workers=0) as cluster:
        assert await cluster.counts() == Counts(Counter(), 0, 0)


def test_all_that_is_left_out_are_rpcs_of_the_manager() -> None:
    methods = {method.name for method in cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods}
    assert methods - NOT_FOR_REQUESTS == {"Route", "Allocate", "Append", "Free", "Report", "Fork"}
    assert methods > NOT_FOR_REQUESTS

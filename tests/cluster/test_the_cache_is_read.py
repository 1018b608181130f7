"""What attention reads are the cached blocks themselves: not recomputed behind our back, not written by anybody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from kvpool.v1 import cache_pb2
from tests.cluster.in_process import InProcessCluster, in_process_cluster
from tests.cluster.truth import NUM_TOP, Truth, truths_of
from tests.lockstep import in_lockstep
from tests.tiny_models import TinyModel, make_tiny_model

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """llama: every layer sees every position."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def truths(tiny: TinyModel) -> list[Truth]:
    return truths_of(tiny)


@pytest.fixture
async def cluster(tiny: TinyModel, tmp_path: Path) -> AsyncIterator[InProcessCluster]:
    async with in_process_cluster(tiny.path, tmp_path, block_size=BLOCK_SIZE, num_blocks=129) as cluster:
        yield cluster


async def test_altering_one_cached_block_changes_the_next_sharers_text(
    cluster: InProcessCluster, tiny: TinyModel, truths: list[Truth]
) -> None:
    """Each block of the chain in its turn; put back as it was, it gives the truth again."""
    truth = truths[3]
    num_blocks = len(truth.prompt) // BLOCK_SIZE
    await cluster.complete(truth.prompt, max_tokens=1)
    for block in await cluster.sealed_chain(num_blocks):
        caches = [layer.v_cache for layer in cluster.worker.runner.kv_cache.layers]
        before = [cache[block].clone() for cache in caches]
        for cache in caches:
            cache[block] += 3.0
        altered = await cluster.complete(truth.prompt, max_tokens=tiny.num_new_tokens)
        assert altered.num_cached_tokens == num_blocks * BLOCK_SIZE
        assert list(altered.token_ids) != truth.tokens
        for cache, was in zip(caches, before, strict=True):
            cache[block] = was
        # Another tenant shares nothing, so it never saw the altered block.
        stranger = await cluster.complete(
            truth.prompt, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP, tenant_salt=f"tenant-{block}"
        )
        assert stranger.num_cached_tokens == 0
        truth.check(stranger)
        truth.check(await cluster.complete(truth.prompt, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP))


async def test_a_text_that_stops_early_costs_only_what_it_computed(
    cluster: InProcessCluster, tiny: TinyModel, truths: list[Truth]
) -> None:
    """A stop id ends the text one token later than what is delivered; its KV is not computed either."""
    truth = truths[2]
    stop = truth.tokens[6]
    expected = truth.tokens[: truth.tokens.index(stop)]
    before = cluster.worker.engine.stats.num_forwarded_tokens
    stopped = await cluster.complete(truth.prompt, max_tokens=tiny.num_new_tokens, stop_token_ids=[stop])
    assert (list(stopped.token_ids), stopped.finish_reason) == (expected, "stop")
    assert cluster.worker.engine.stats.num_forwarded_tokens - before == len(truth.prompt) + len(expected)


async def test_the_bytes_of_a_sealed_block_never_change(tiny: TinyModel, truths: list[Truth], tmp_path: Path) -> None:
    """Whoever uses it, and whatever is evicted and preempted around it: as long as block and generation are the same, and
    the block is sealed, so are its bytes."""
    async with in_process_cluster(
        tiny.path, tmp_path, block_size=BLOCK_SIZE, num_blocks=25, max_num_batched_tokens=7, max_num_seqs=6
    ) as cluster:
        seen: dict[tuple[int, int], list[torch.Tensor]] = {}
        num_compared = num_shared = 0

        def compare(blocks: list[cache_pb2.BlockDescription]) -> None:
            nonlocal num_compared, num_shared
            for block in blocks:
                if not block.sealed:
                    continue
                now = cluster.block_bytes(block.block_id)
                then = seen.setdefault((block.block_id, block.generation), now)
                num_compared += then is not now
                num_shared += block.ref_count > 1
                assert all(torch.equal(a, b) for a, b in zip(then, now, strict=True)), block

        async def look() -> None:
            compare(list((await cluster.describe()).blocks))

        prompts = [truth.prompt for truth in truths for _ in range(2)]
        for _ in range(2):
            async with in_lockstep(cluster.worker.engine, len(prompts), before_step=look):
                found = await cluster.all_at_once(prompts, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP)
            for number, completion in enumerate(found):
                truths[number // 2].check(completion)
        assert num_compared > 500
        assert num_shared > 50
        totals = (await cluster.describe()).totals
        assert totals.num_evicted_blocks > 0
        assert cluster.worker.engine.scheduler.num_preemptions > 0

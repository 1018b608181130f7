"""Whatever the batch, the chunks, the cache and the pressure: in float32 the tokens are those of transformers' generate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path

import pytest

from tests.cluster.in_process import TIGHT, in_process_cluster
from tests.cluster.truth import NUM_TOP, Truth, check_all, truths_of
from tests.lockstep import in_lockstep
from tests.tiny_models import make_tiny_model

CAPACITY = 20
ALL_WINDOWS = ("mistral",)
NUM_OF_STORM = 60


# Full attention, windows next to it, and windows only; what else differs is in tests/model.
@pytest.mark.parametrize(("architecture", "runtime"), [("llama", "torch"), ("gemma2", "auto"), ("mistral", "auto")])
async def test_a_tight_pool_with_small_chunks_changes_no_token(architecture: str, runtime: str, tmp_path: Path) -> None:
    """Cold, warm, at once, alone; with eviction and preemption on the way."""
    tiny = make_tiny_model(architecture, tmp_path / architecture)
    truths = truths_of(tiny)
    async with in_process_cluster(tiny.path, tmp_path, runtime=runtime, **TIGHT) as cluster:
        async with in_lockstep(cluster.worker.engine, len(truths)):
            cold = await cluster.all_at_once(tiny.prompts, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP)
        check_all(truths, cold)
        # Decoding never waits for blocks of layers with a window.
        assert any(completion.num_preemptions for completion in cold) == (architecture not in ALL_WINDOWS)
        check_all(truths, await cluster.all_at_once(tiny.prompts, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP))
        for truth in truths[1:3]:
            # The second time all full blocks of the prompt are there.
            for num_tokens in (tiny.num_new_tokens, 4):
                alone = await cluster.complete(truth.prompt, max_tokens=num_tokens, logprobs=NUM_TOP)
                truth.first(num_tokens).check(alone)
                assert alone.num_preemptions == 0
            assert alone.num_cached_tokens == (len(truth.prompt) - 1) // 4 * 4
        described = await cluster.describe()
        assert described.totals.num_evicted_blocks > 0
        assert described.counts[0].capacity == CAPACITY


async def test_without_the_cache_nothing_is_shared_and_no_token_is_another(tmp_path: Path) -> None:
    tiny = make_tiny_model("gemma2", tmp_path / "gemma2")
    truths = truths_of(tiny)
    async with in_process_cluster(tiny.path, tmp_path, **TIGHT, prefix_caching=False) as cluster:
        for num_tokens in (tiny.num_new_tokens, 1):
            uncached = await cluster.all_at_once(tiny.prompts, max_tokens=num_tokens, logprobs=NUM_TOP)
            check_all([truth.first(num_tokens) for truth in truths], uncached)
            assert [completion.num_cached_tokens for completion in uncached] == [0] * len(truths)


@pytest.mark.parametrize("settings", [{}, {"report_seconds": 0.0, "reserve_seconds": 0.0}], ids=["as_is", "eager"])
async def test_a_storm_in_a_tight_pool_tells_nothing_but_the_truth(settings: dict[str, float], tmp_path: Path) -> None:
    """Many requests of all lengths at once, many of them cancelled: each token delivered is the right one. Five run at a time in a
    pool for one of the longest."""
    tiny = make_tiny_model("llama", tmp_path / "llama")
    truths = truths_of(tiny)
    numbers = random.Random(11)
    async with in_process_cluster(tiny.path, tmp_path, **{**TIGHT, "num_blocks": 16}, **settings) as cluster:

        async def one(truth: Truth, num_tokens: int, num_wanted: int) -> None:
            delivered: list[int] = []
            async with cluster.client.generate(truth.prompt, max_tokens=num_tokens, ignore_eos=True) as stream:
                async for chunk in stream:
                    delivered += chunk.token_ids
                    if len(delivered) >= num_wanted:
                        break
            assert delivered == truth.tokens[: len(delivered)]
            assert len(delivered) >= min(num_tokens, num_wanted)

        def some() -> Coroutine[None, None, None]:
            truth = numbers.choice(truths)
            return one(truth, numbers.randint(1, 16), numbers.choice((1, 3, 9, 99)))

        async with in_lockstep(cluster.worker.engine, NUM_OF_STORM):
            await asyncio.gather(*(some() for _ in range(NUM_OF_STORM)))
        await cluster.until_idle()
        totals = (await cluster.describe()).totals
        assert totals.num_evicted_blocks > 0
        assert totals.num_cached_tokens > 0
        assert cluster.worker.engine.scheduler.num_preemptions > 0

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
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, Oracle, make_tiny_model

NUM_OF_STORM = 60


# Full attention, windows next to it, and windows only; what else differs is in tests/model.
@pytest.mark.parametrize(("architecture", "runtime"), [("llama", "torch"), ("gemma2", "auto"), ("mistral", "auto")])
async def test_a_tight_pool_with_small_chunks_changes_no_token(architecture: str, runtime: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(architecture, tmp_path / architecture)
    truths = truths_of(tiny)
    async with in_process_cluster(tiny.path, tmp_path, runtime=runtime, **TIGHT) as cluster:
        async with in_lockstep(cluster.worker.engine, len(truths)):
            cold = await cluster.all_at_once(tiny.prompts, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP)
        check_all(truths, cold)
        # Decoding never waits for blocks of layers with a window.
        assert any(completion.num_preemptions for completion in cold) == (architecture != "mistral")
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
        assert described.counts[0].capacity == 20


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
    """Five requests run at a time in a pool for one of the longest."""
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


# -- with recurrent layers, whose states are kept on a grid

GRID = 64
NUM_NEW = 8
WITH_STATES = {
    "block_size": 16,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 96,
    "num_blocks": 64,
    "state_blocks": 40,
}


def prompts_around_the_grid(seed: int) -> list[tuple[int, ...]]:
    """Two that share 150 tokens, one that shares nothing, and its beginning, shorter than the grid."""
    numbers = random.Random(seed)
    long = tuple(numbers.randrange(VOCAB_SIZE) for _ in range(200))
    other = tuple(numbers.randrange(VOCAB_SIZE) for _ in range(140))
    return [long, long[:150] + other[:30], other, other[:40]]


def truths_around_the_grid(path: Path) -> list[Truth]:
    """Of the first prompts whose tokens are beyond doubt."""
    oracle = Oracle.of(path)
    for seed in range(20):
        try:
            return [Truth.of(oracle, prompt, NUM_NEW) for prompt in prompts_around_the_grid(seed)]
        except AssertionError:
            continue
    raise AssertionError("all prompts prove nothing")


# States alone, and one that is a matrix next to attention.
@pytest.mark.parametrize("architecture", ["mamba2", "qwen3_next"])
async def test_cold_warm_and_in_company_the_tokens_are_those_of_generate(architecture: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(architecture, tmp_path / architecture)
    truths = truths_around_the_grid(tiny.path)
    asked = [truth.prompt for truth in truths]
    async with in_process_cluster(tiny.path, tmp_path, runtime="auto", **WITH_STATES) as cluster:
        for _ in range(2):
            check_all(truths, await cluster.all_at_once(asked, max_tokens=NUM_NEW, logprobs=NUM_TOP))
        for truth in truths:
            alone = await cluster.complete(truth.prompt, max_tokens=NUM_NEW, logprobs=NUM_TOP)
            truth.check(alone)
            assert alone.num_cached_tokens == (len(truth.prompt) - 1) // GRID * GRID


# The states' pool alone, which mamba2 has; and both.
@pytest.mark.parametrize(
    ("architecture", "pressure"),
    [("mamba2", {"state_blocks": 4}), ("lfm2", {"num_blocks": 18, "state_blocks": 6})],
    ids=["states", "both"],
)
async def test_pressure_in_any_pool_changes_no_token(
    architecture: str, pressure: dict[str, int], tmp_path: Path
) -> None:
    """The states have room for one sequence and a snapshot, or for two, and attention for one long prompt and a little."""
    tiny = make_tiny_model(architecture, tmp_path / architecture)
    truths = truths_around_the_grid(tiny.path)
    asked = [truth.prompt for truth in truths]
    async with in_process_cluster(tiny.path, tmp_path, runtime="auto", **WITH_STATES | pressure) as cluster:
        for salt in ("", "a", "a"):
            found = await cluster.all_at_once(asked, max_tokens=NUM_NEW, logprobs=NUM_TOP, tenant_salt=salt)
            check_all(truths, found)
        totals = (await cluster.describe()).totals
        assert totals.num_evicted_blocks > 0


async def test_a_preempted_sequence_begins_again_with_no_state(tmp_path: Path) -> None:
    tiny = make_tiny_model("lfm2", tmp_path / "lfm2")
    oracle = Oracle.of(tiny.path)
    numbers = random.Random(3)
    asked = [tuple(numbers.randrange(VOCAB_SIZE) for _ in range(70)) for _ in range(2)]
    truths = [Truth.of(oracle, prompt, 60) for prompt in asked]
    async with in_process_cluster(
        tiny.path, tmp_path, **WITH_STATES | {"num_blocks": 15, "prefix_caching": False}
    ) as cluster:
        async with in_lockstep(cluster.worker.engine, len(asked)):
            found = await cluster.all_at_once(asked, max_tokens=60, logprobs=NUM_TOP)
        check_all(truths, found)
        assert sum(completion.num_preemptions for completion in found) > 0


async def test_the_third_prompt_with_a_shared_beginning_hits_it_and_the_second_if_a_boundary_is_asked_for(
    tmp_path: Path,
) -> None:
    """They share 150 tokens, after 128 of which is a place of the grid; each ends after 192."""
    tiny = make_tiny_model("qwen3_next", tmp_path / "qwen3_next")
    numbers = random.Random(4)
    shared = [numbers.randrange(VOCAB_SIZE) for _ in range(150)]
    prompts = [shared + [numbers.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(4)]
    async with in_process_cluster(tiny.path, tmp_path, **WITH_STATES) as cluster:
        found = [(await cluster.complete(prompt, max_tokens=2)).num_cached_tokens for prompt in prompts]
        assert found == [0, 0, 128, 128]
        together = await cluster.all_at_once(prompts, max_tokens=2, tenant_salt="together")
        assert sorted(completion.num_cached_tokens for completion in together)[1:] == [128, 128, 128]

"""Greedy float32 over real processes equals transformers' generate: several models behind one manager."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.tiny_cluster import TinyCluster
from tests.cluster.truth import NUM_TOP, check_all

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORKERS = (TinyCluster.ROOMY, *TinyCluster.TIGHT)


async def test_several_models_at_once_cold_and_warm_answer_the_truth(tiny: TinyCluster) -> None:
    """All prompts of all models at the same instant, twice; the client chooses the worker by its model."""
    truths = {name: tiny.truths(name) for name in WORKERS}
    for is_warm in (False, True):
        answers = await asyncio.gather(
            *(
                tiny.cluster.all_at_once(
                    tiny.models[name].prompts,
                    model=name,
                    max_tokens=tiny.models[name].num_new_tokens,
                    logprobs=NUM_TOP,
                )
                for name in WORKERS
            )
        )
        for name, completions in zip(WORKERS, answers, strict=True):
            check_all(truths[name], completions)
            assert {completion.worker_id for completion in completions} == {name}
            assert name in TinyCluster.TIGHT or not any(completion.num_preemptions for completion in completions)
        if is_warm:
            assert all(completion.num_cached_tokens > 0 for completion in answers[0][1:])
    await tiny.cluster.until_clean()
    for name in TinyCluster.TIGHT:
        assert (await tiny.cluster.worker(name)).totals.num_evicted_blocks > 0

"""An encoder-decoder model over real processes: neither a manager nor a worker that is killed disturbs a text."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvpool.worker_service.model.guard.tiny_replica import NUM_PLAIN_TOKENS, replica_config
from scripts.models.subjects import default_seq2seq_config
from scripts.models.trial import save
from tests.client.clients import begun
from tests.cluster.cluster import MANAGER, Cluster
from tests.tiny_models import MIN_MARGIN, Oracle

pytestmark = pytest.mark.slow

NUM_NEW = 40
STEP_SECONDS = 0.04
WORKER = {
    "block_size": 4,
    "num_blocks": 513,
    "cross_blocks": 65,
    "max_model_len": 256,
    "reserve_seconds": 60,
    "max_num_batched_tokens": 64,
    "step_seconds": STEP_SECONDS,
}


def make_truths(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """A tiny t5 in a folder, and what it must answer to some inputs: none of these tokens is a matter of rounding."""
    config = replica_config(default_seq2seq_config("t5"), 1 << 20)
    save(config, folder)
    oracle = Oracle.of(folder)
    truths: dict[tuple[int, ...], list[int]] = {}
    for seed in range(200):
        draw = random.Random(seed)
        prompt = tuple(draw.randrange(16, NUM_PLAIN_TOKENS) for _ in range(10 + seed % 20))
        tokens, logits = oracle.logits(prompt, NUM_NEW, [config.decoder_start_token_id])
        if float(logits.topk(2, dim=-1).values.diff(dim=-1).abs().min()) >= MIN_MARGIN:
            truths[prompt] = tokens
            if len(truths) == 3:
                return truths
    raise AssertionError("too few inputs prove anything")


async def test_a_manager_that_is_killed_costs_no_token_and_no_unit(tmp_path: Path) -> None:
    truths = make_truths(tmp_path / "t5")
    async with Cluster(tmp_path, lease_seconds=2.0, keep_alive_seconds=0.2) as cluster:
        await cluster.start({"a": {"model": tmp_path / "t5", **WORKER}})
        async with cluster.client() as client:
            streams = [client.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True) for prompt in truths]
            await asyncio.gather(*(begun(stream, 5) for stream in streams))
            cluster.kill(MANAGER)
            await cluster.start_manager()
            await cluster.until_registered("a")
            answers = await asyncio.gather(*(stream.collect() for stream in streams))
            assert [list(answer.token_ids) for answer in answers] == list(truths.values())
            assert {answer.num_attempts for answer in answers} == {1}
            await cluster.until_clean()
            again = await cluster.all_at_once(list(truths), max_tokens=NUM_NEW)
            assert [list(answer.token_ids) for answer in again] == list(truths.values())
            assert [answer.num_cached_tokens for answer in again] == [len(prompt) for prompt in truths]


async def test_a_worker_that_is_killed_hands_its_texts_to_the_other(tmp_path: Path) -> None:
    """The other one runs the encoder over the same input, and the decoder goes on after what was delivered. The one that was
    killed is back before its lease has ended: it proves that it is the next process of that worker."""
    truths = make_truths(tmp_path / "t5")
    async with Cluster(tmp_path, lease_seconds=600.0, keep_alive_seconds=0.2) as cluster:
        worker = {"model": tmp_path / "t5", **WORKER}
        await cluster.start({"a": worker, "b": worker})
        async with cluster.client(liveness_interval=0.5) as client:
            streams = [client.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True) for prompt in truths]
            await asyncio.gather(*(begun(stream, 5) for stream in streams))
            described = {one.worker_id: one.num_sequences for one in await cluster.describe()}
            victim = max(described, key=lambda name: described[name])
            cluster.kill(victim)
            answers = await asyncio.gather(*(stream.collect() for stream in streams))
            assert [list(answer.token_ids) for answer in answers] == list(truths.values())
            assert max(answer.num_attempts for answer in answers) > 1
            assert [answer.num_prompt_tokens for answer in answers] == [len(prompt) for prompt in truths]
        cluster.start_worker(victim)
        await cluster.until_registered(victim)

"""A real model over real processes: SmolLM2 in float32 says what transformers' generate says, token by token.

Converts the model at the very first run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kvpool.client import Completion, FinishReason
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model
from tests.cluster.cluster import Cluster
from tests.cluster.truth import NUM_TOP, Truth, check_all
from tests.tiny_models import Oracle

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(420),
]

NUM_NEW = 8
BLOCK_SIZE = 16
SYSTEM = "You are a helpful assistant who answers briefly and never makes anything up. Say so when you do not know.\n"
DIARY = " ".join(
    f"Chapter {day}. The traveller counted {day * 7 % 23} bridges, {day * 5 % 17} towers and {day * 11 % 29} boats "
    "before night fell."
    for day in range(1, 101)
)
TEXTS = (
    "The",
    "What is the capital of France?",
    "東京は日本の首都であり、",
    "Москва является столицей",
    "القاهرة هي عاصمة",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    SYSTEM + "Question: what is water made of?\nAnswer:",
    SYSTEM + "Question: who wrote Hamlet?\nAnswer:",
    SYSTEM + "Question: how many legs has a spider?\nAnswer:",
    DIARY + "\nThe traveller",
    DIARY + "\nQuestion: what did the traveller count?\nAnswer:",
)
"""Short, several thousand tokens, other scripts, code, and two beginnings that several prompts share."""
SHARED_TOKENS = (*[0] * 8, 16, 16, 0, 2544)
"""Served from the cache when the texts come one after the other."""


@dataclass(frozen=True)
class Subject:
    """Two clusters of one worker each; the second serves nothing from its cache."""

    cached: Cluster
    uncached: Cluster
    tokenizer: Tokenizer
    oracle: Oracle
    truths: list[Truth]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    folder = resolve_model("smollm2", default_cache_dir(), print).path
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    truths = asyncio.create_task(asyncio.to_thread(compute_truths, oracle, tokenizer))
    cached, uncached = (Cluster(tmp_path_factory.mktemp(name)) for name in ("cached", "uncached"))
    async with cached, uncached:
        for cluster, prefix_caching in ((cached, True), (uncached, False)):
            await cluster.start_manager()
            cluster.start_worker(
                "worker",
                model="smollm2",
                threads=os.cpu_count() or 1,
                num_blocks=800,
                max_num_batched_tokens=600,
                prefix_caching=prefix_caching,
            )
        await cached.until_registered("worker")
        await uncached.until_registered("worker")
        yield Subject(cached, uncached, tokenizer, oracle, await truths)
        await cached.until_clean()
        await uncached.until_clean()


def compute_truths(oracle: Oracle, tokenizer: Tokenizer) -> list[Truth]:
    """One core, half a minute; meanwhile the workers start on the other."""
    torch.set_num_threads(1)
    return [Truth(oracle, tokenizer.encode(text).ids, NUM_NEW) for text in TEXTS]


async def ask_all(subject: Subject, cluster: Cluster, salt: str) -> list[Completion]:
    """All at the same instant; every answer must be the truth, as text too."""
    completions = await cluster.all_at_once(TEXTS, max_tokens=NUM_NEW, logprobs=NUM_TOP, tenant_salt=salt)
    check_all(subject.truths, completions)
    for completion, truth in zip(completions, subject.truths, strict=True):
        assert completion.text == text_of(subject, truth)
    return completions


def text_of(subject: Subject, truth: Truth) -> str:
    """What the tokens add to the prompt, bytes of a character that never came to its end included."""
    prompt: str = subject.tokenizer.decode(truth.prompt)
    both: str = subject.tokenizer.decode([*truth.prompt, *truth.tokens])
    return both.removeprefix(prompt)


def num_full(num_tokens: int) -> int:
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


async def test_all_at_once_cold_and_warm_equals_generate(subject: Subject) -> None:
    """Cold, common beginnings are computed once although all arrive together; warm, only the last block is."""
    cold = await ask_all(subject, subject.cached, "at once")
    assert sorted(completion.num_cached_tokens for completion in cold[7:10]) == [0, 16, 16]
    assert sorted(completion.num_cached_tokens for completion in cold[10:]) == [0, 2544]
    warm = await ask_all(subject, subject.cached, "at once")
    assert [c.num_cached_tokens for c in warm] == [num_full(len(truth.prompt)) for truth in subject.truths]


async def test_one_after_the_other_cold_and_warm_equals_generate(subject: Subject) -> None:
    for index, (text, truth) in enumerate(zip(TEXTS, subject.truths, strict=True)):
        for expected in (SHARED_TOKENS[index], num_full(len(truth.prompt))):
            completion = await subject.cached.complete(
                text, max_tokens=NUM_NEW, logprobs=NUM_TOP, tenant_salt="one by one"
            )
            truth.check(completion)
            assert completion.num_cached_tokens == expected


async def test_without_the_cache_equals_generate(subject: Subject) -> None:
    """At once, and some of them alone."""
    uncached = await ask_all(subject, subject.uncached, "")
    for text, truth in list(zip(TEXTS, subject.truths, strict=True))[2:8:2]:
        uncached.append(await subject.uncached.complete(text, max_tokens=NUM_NEW, logprobs=NUM_TOP))
        truth.check(uncached[-1])
    assert {completion.num_cached_tokens for completion in uncached} == {0}


async def test_a_chat_ends_where_the_model_ends_it(subject: Subject) -> None:
    """The template, the end-of-text id and the text that people see."""
    async with subject.cached.client() as client:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = await client.chat(messages, max_tokens=64).collect()
        assert answer.text == "The capital of France is Paris."
        assert answer.finish_reason is FinishReason.STOP
        eos = (await client.model()).eos_token_ids
        model = await client.model()
        prompt = tuple(model.encode_chat(messages))
    tokens, _ = subject.oracle.logits(prompt, len(answer.token_ids) + 1)
    assert tokens[:-1] == list(answer.token_ids)
    assert tokens[-1] in eos

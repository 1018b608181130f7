"""A real model over real processes: SmolLM2 in float32 says what transformers' generate says, token by token.

Converts the model at the very first run. Its prompts one by one and without the cache are said by tiny models:
test_truth_in_process.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvpool.client import FinishReason
from tests.cluster import smollm2
from tests.cluster.cluster import Cluster
from tests.cluster.truth import LOGPROB_TOLERANCE, NUM_TOP, check_all
from tests.tiny_models import Oracle

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(420)]

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return smollm2.oracle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path_factory.mktemp("smollm2")) as cluster:
        # The short prompts and a chunk of a long one fit into one step: a prefix in flight is not waited for after ten seconds in
        # which steps have no room for it.
        await cluster.start({"worker": {"model": "smollm2", "num_blocks": 200, "max_num_batched_tokens": 128}})
        yield cluster
        await cluster.until_clean()


async def test_the_stored_answers_are_those_of_generate(oracle: Oracle) -> None:
    """A text of another script, and one whose beginning several share; all of them take generate too long for each run."""
    for now, stored in zip(smollm2.compute(oracle, smollm2.TEXTS[2:10:6]), smollm2.stored()[2:10:6], strict=True):
        assert (now.prompt, now.tokens) == (stored.prompt, stored.tokens)
        for step, best in zip(now.best, stored.best, strict=True):
            assert step == pytest.approx(best, abs=LOGPROB_TOLERANCE)


async def test_all_at_once_cold_and_warm_equals_generate(cluster: Cluster) -> None:
    chosen = [1, 2, 7, 8, 10, 11]
    truths, texts = [smollm2.stored()[index] for index in chosen], [smollm2.TEXTS[index] for index in chosen]
    cold, warm = [await cluster.all_at_once(texts, max_tokens=smollm2.NUM_NEW, logprobs=NUM_TOP) for _ in range(2)]
    check_all(truths * 2, [*cold, *warm])
    assert sorted(completion.num_cached_tokens for completion in cold[2:4]) == [0, 16]
    assert sorted(completion.num_cached_tokens for completion in cold[4:]) == [0, 192]
    full = [(len(truth.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for truth in truths]
    assert [completion.num_cached_tokens for completion in warm] == full
    decode = smollm2.tokenizer().decode
    for completion, truth in zip(cold, truths, strict=True):
        # What the tokens add to the prompt, bytes of a character that never came to its end included.
        added = decode([*truth.prompt, *truth.tokens]).removeprefix(decode(truth.prompt))
        assert completion.text == added


async def test_a_chat_ends_where_the_model_ends_it(cluster: Cluster, oracle: Oracle) -> None:
    async with cluster.client() as client:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = await client.chat(messages, max_tokens=64).collect()
        assert answer.text == "The capital of France is Paris."
        assert answer.finish_reason is FinishReason.STOP
        model = await client.model()
        prompt = tuple(model.encode_chat(messages))
    tokens, _ = oracle.logits(prompt, len(answer.token_ids) + 1)
    assert tokens[:-1] == list(answer.token_ids)
    assert tokens[-1] in model.eos_token_ids

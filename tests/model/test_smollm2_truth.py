"""SmolLM2 in float32 over paged KV equals transformers' generate, and has the same bits in any batch. Converts it at the first run.

tests/cluster/test_smollm2_cluster.py has the step in C, which a worker takes where it can, and compares the stored answers with
those of generate.
"""

from __future__ import annotations

import random

import pytest

from kvpool.worker_service.model.load import LoadedModel, load_model
from kvpool.worker_service.model.settings import ModelSettings
from tests.cluster import smollm2
from tests.cluster.truth import LOGPROB_TOLERANCE, Truth
from tests.model.paged import BLOCK_SIZE, SHORT_SEGMENTS, PagedModel, quiet
from tests.model.test_batch_invariance import (
    NUM_BLOCKS,
    alone,
    assert_same_bits,
    chunks_of,
    compute,
    fresh,
    one_segment,
    skip_unless_promised,
)

pytestmark = [
    pytest.mark.slow,
]

NUM_NEW = 5
NUM_LONG = 2
"""Texts of thousands of tokens, the last ones."""
NUM_SHARERS = 3
"""Texts that begin with SYSTEM, before those."""


@pytest.fixture(scope="module")
def truths() -> list[Truth]:
    stored = smollm2.stored()[:-NUM_LONG]
    return [truth.first(NUM_NEW) for truth in (stored[0], *stored[4:6], *stored[-NUM_SHARERS:])]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """In torch's modules."""
    return load_model(ModelSettings("smollm2", dtype="float32", device="cpu", num_threads=1, runtime="torch"), quiet)


def test_smollm2_equals_generate(truths: list[Truth], loaded: LoadedModel) -> None:
    """The beginning that texts share is attended once for all."""
    paged = PagedModel(loaded, min_shared_tokens=1, shapes=SHORT_SEGMENTS)
    num_new, num_shared = NUM_NEW, len(smollm2.tokenizer().encode(smollm2.SYSTEM).ids)
    others, sharers = truths[:-NUM_SHARERS], truths[-NUM_SHARERS:]
    first = paged.request(sharers[0].prompt, num_new)
    paged.run([first])
    shared = first.table[: num_shared // BLOCK_SIZE]
    requests = [paged.request(truth.prompt, num_new) for truth in others]
    requests += [paged.request(truth.prompt, num_new, shared) for truth in sharers]
    paged.run(requests, chunk=16, stagger=1)
    for request, truth in zip(requests, truths, strict=True):
        assert request.token_ids == truth.tokens
        assert request.logprobs == pytest.approx([best[0] for best in truth.best], abs=LOGPROB_TOLERANCE)


def test_its_bits_are_the_same_alone_packed_in_chunks_and_behind_a_shared_prefix(loaded: LoadedModel) -> None:
    """Sizes at which sums and products go other ways than in tiny models."""
    skip_unless_promised(loaded)
    numbers = random.Random(2)
    shared_tokens = one_segment(PagedModel(loaded, NUM_BLOCKS)) + 8
    long, short = ([numbers.randrange(loaded.facts.vocab_size) for _ in range(n)] for n in (shared_tokens + 12, 5))
    by_itself = alone(PagedModel(loaded, NUM_BLOCKS), [long, short])
    paged = PagedModel(loaded, NUM_BLOCKS, min_shared_tokens=1)
    runs = [fresh(paged, long), fresh(paged, short)]
    first = compute(paged, runs, chunks_of(64, 100))  # gathered
    shared = runs[0].table[: shared_tokens // BLOCK_SIZE]
    sharers = [fresh(paged, long, shared) for _ in range(2)]
    found = compute(paged, sharers, chunks_of(1, 7, 3))  # attended once, in other chunks each
    expected = [*by_itself, by_itself[0][shared_tokens:], by_itself[0][shared_tokens:]]
    for ours, truth in zip([*first, *found], expected, strict=True):
        assert_same_bits(ours, truth)

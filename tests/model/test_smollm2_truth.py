"""SmolLM2 in float32 over paged KV equals transformers' generate. Converts the model at the first run.

tests/cluster/test_smollm2_cluster.py compares the stored answers with those of generate.
"""

from __future__ import annotations

import pytest

from kvpool.worker_service.model.load import load_model
from kvpool.worker_service.model.settings import ModelSettings, RuntimeName
from tests.cluster import smollm2
from tests.cluster.truth import LOGPROB_TOLERANCE, Truth
from tests.model.paged import BLOCK_SIZE, SHORT_SEGMENTS, PagedModel, quiet

pytestmark = [
    pytest.mark.slow,
]

NUM_LONG = 2
"""Texts of thousands of tokens, the last ones."""
NUM_SHARERS = 3
"""Texts that begin with SYSTEM, before those."""


@pytest.fixture(scope="module")
def truths() -> list[Truth]:
    return smollm2.stored()[:-NUM_LONG]


@pytest.mark.parametrize("runtime", ["auto", "torch"])
def test_smollm2_equals_generate(truths: list[Truth], runtime: RuntimeName) -> None:
    """In the step that a worker takes here, and in torch's modules, which attend the beginning that texts share once for all."""
    settings = ModelSettings("smollm2", dtype="float32", device="cpu", num_threads=1, runtime=runtime)
    paged = PagedModel(load_model(settings, quiet), min_shared_tokens=1, shapes=SHORT_SEGMENTS)
    num_new, num_shared = smollm2.NUM_NEW, len(smollm2.tokenizer().encode(smollm2.SYSTEM).ids)
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

"""SmolLM2 in float32 over paged KV equals transformers' generate. Converts the model at the first run."""

from __future__ import annotations

import pytest

from kvpool.worker_service.model.load import LoadedModel, load_model
from kvpool.worker_service.model.settings import ModelSettings
from tests.cluster import smollm2
from tests.cluster.truth import LOGPROB_TOLERANCE, Truth
from tests.model.paged import BLOCK_SIZE, NEVER, SHORT_SEGMENTS, PagedModel, quiet

pytestmark = [
    pytest.mark.slow,
]

NUM_NEW = 12
COMMON = "You are a helpful assistant who answers briefly and never makes anything up.\n"
TEXTS = (
    "The three primary colours are",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "東京は日本の",
    COMMON + "Question: what is water made of?\nAnswer:",
    COMMON + "Question: who wrote Hamlet?\nAnswer:",
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSettings("smollm2", dtype="float32", device="cpu", num_threads=1), quiet)


@pytest.fixture(scope="module")
def truths() -> list[Truth]:
    return smollm2.compute(smollm2.oracle(), TEXTS, NUM_NEW)


@pytest.mark.parametrize("min_shared_tokens", [NEVER, 1], ids=["gathered", "attended_once"])
def test_smollm2_equals_generate(loaded: LoadedModel, truths: list[Truth], min_shared_tokens: int) -> None:
    paged = PagedModel(loaded, min_shared_tokens=min_shared_tokens, shapes=SHORT_SEGMENTS)
    first = paged.request(truths[3].prompt, NUM_NEW)
    paged.run([first])
    shared = first.table[: len(smollm2.tokenizer().encode(COMMON).ids) // BLOCK_SIZE]
    requests = [paged.request(truth.prompt, NUM_NEW, shared if at >= 3 else ()) for at, truth in enumerate(truths)]
    paged.run(requests, chunk=16, stagger=1)
    for request, truth in zip(requests, truths, strict=True):
        assert request.token_ids == truth.tokens
        assert request.logprobs == pytest.approx([best[0] for best in truth.best], abs=LOGPROB_TOLERANCE)

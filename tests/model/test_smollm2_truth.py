"""SmolLM2 in float32 over paged KV equals transformers' generate. Converts the model at the first run."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kvpool.worker_service.model.load import LoadedModel, load_model
from kvpool.worker_service.model.settings import ModelSettings
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model
from tests.model.paged import BLOCK_SIZE, NEVER, SHORT_SEGMENTS, PagedModel, quiet
from tests.tiny_models import Oracle

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


@pytest.mark.parametrize("min_shared_tokens", [NEVER, 1], ids=["gathered", "attended_once"])
def test_smollm2_equals_generate(loaded: LoadedModel, min_shared_tokens: int) -> None:
    folder = resolve_model("smollm2", default_cache_dir(), quiet).path
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert loaded.facts.tokenizer_json is not None
    tokenizer = Tokenizer.from_str(loaded.facts.tokenizer_json.decode())
    prompts = [tuple(tokenizer.encode(text).ids) for text in TEXTS]
    paged = PagedModel(loaded, min_shared_tokens=min_shared_tokens, shapes=SHORT_SEGMENTS)
    first = paged.request(prompts[3], NUM_NEW)
    paged.run([first])
    shared = first.table[: len(tokenizer.encode(COMMON).ids) // BLOCK_SIZE]
    requests = [
        *(paged.request(prompt, NUM_NEW) for prompt in prompts[:3]),
        *(paged.request(prompt, NUM_NEW, shared) for prompt in prompts[3:]),
    ]
    paged.run(requests, chunk=16, stagger=1)
    for request, prompt in zip(requests, prompts, strict=True):
        tokens, logits = oracle.logits(prompt, NUM_NEW)
        assert request.token_ids == tokens
        logprobs = torch.log_softmax(logits, dim=-1)
        expected = [float(logprobs[index, token]) for index, token in enumerate(tokens)]
        assert request.logprobs == pytest.approx(expected, abs=1e-4)

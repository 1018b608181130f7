"""Models with recurrent layers in a cluster: in float32 the tokens are those of transformers' generate, snapshots or not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cluster.in_process import in_process_cluster
from tests.cluster.truth import NUM_TOP, Truth, check_all
from tests.tiny_models import MAX_MODEL_LEN, STATE_ARCHITECTURES, VOCAB_SIZE, Oracle, make_tiny_model

# transformers' own modules, imported by these models, annotate in a way that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

GRID = 64
NUM_NEW = 8
SETTINGS = {
    "block_size": 16,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 96,
    "num_blocks": 64,
    "state_blocks": 40,
}


def prompts(seed: int) -> list[tuple[int, ...]]:
    """Two that share 150 tokens, one that shares nothing, and its beginning, shorter than the grid."""
    numbers = random.Random(seed)
    long = tuple(numbers.randrange(VOCAB_SIZE) for _ in range(200))
    other = tuple(numbers.randrange(VOCAB_SIZE) for _ in range(140))
    return [long, long[:150] + other[:30], other, other[:40]]


def truths_of(path: Path) -> list[Truth]:
    """Of the first prompts whose tokens are beyond doubt."""
    oracle = Oracle.of(path)
    for seed in range(20):
        try:
            return [Truth.of(oracle, prompt, NUM_NEW) for prompt in prompts(seed)]
        except AssertionError:
            continue
    raise AssertionError("all prompts prove nothing")


@pytest.mark.parametrize("architecture", STATE_ARCHITECTURES)
async def test_cold_warm_and_in_company_the_tokens_are_those_of_generate(architecture: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(architecture, tmp_path / architecture)
    truths = truths_of(tiny.path)
    asked = [truth.prompt for truth in truths]
    async with in_process_cluster(tiny.path, tmp_path, runtime="auto", **SETTINGS) as cluster:
        for _ in range(2):
            check_all(truths, await cluster.all_at_once(asked, max_tokens=NUM_NEW, logprobs=NUM_TOP))
        for truth in truths:
            alone = await cluster.complete(truth.prompt, max_tokens=NUM_NEW, logprobs=NUM_TOP)
            truth.check(alone)
            assert alone.num_cached_tokens == (len(truth.prompt) - 1) // GRID * GRID

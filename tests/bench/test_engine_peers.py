"""The engines that `make bench KIND=serve` compares tell real texts: a tiny model's, token by token those of transformers."""

from __future__ import annotations

import asyncio
import sys

import pytest

from bench.piped_engine import PipedEngine
from kvpool.load.engine import EngineUnderLoad, ServedRequest
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, Oracle, TinyModel, make_tiny_model

pytestmark = pytest.mark.slow

SERVED = ServedRequest("tiny", range(VOCAB_SIZE), MAX_MODEL_LEN)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


async def answer(engine: EngineUnderLoad, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], int | None]:
    """The tokens, and what was cached."""
    tokens: list[int] = []
    cached: int | None = None
    async for delivery in engine.generate(prompt, num_tokens):
        tokens += delivery.token_ids
        cached = delivery.num_cached_tokens if delivery.num_cached_tokens is not None else cached
    return tokens, cached


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "model", tokenizer=True)


async def test_our_engine_without_grpc_tells_what_transformers_tells(model: TinyModel) -> None:
    command = [
        *(sys.executable, "-m", "bench.our_engine_peer", "--model", str(model.path), "--dtype", "float32"),
        *("--device", "cpu", "--block-size", "4", "--num-blocks", "257", "--cache-dir", str(default_cache_dir())),
        *("--log-level", "warning"),
    ]
    engine = await PipedEngine.start("ours", command, ENVIRONMENT, SERVED, 60.0)
    try:
        assert engine.facts["engine"].startswith("kvpool ")
        found = await asyncio.gather(*(answer(engine, prompt, model.num_new_tokens) for prompt in model.prompts))
        again = await asyncio.gather(*(answer(engine, prompt, model.num_new_tokens) for prompt in model.prompts))
    finally:
        await engine.close()
    oracle = Oracle.of(model.path)
    expected = [oracle.logits(prompt, model.num_new_tokens)[0] for prompt in model.prompts]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in again] == expected
    # The second time all full blocks of a prompt are there, but for its last token.
    assert [cached for _, cached in again] == [(len(prompt) - 1) // 4 * 4 for prompt in model.prompts]


async def test_transformers_continuous_batching_streams_its_tokens(model: TinyModel) -> None:
    """In bfloat16, so its tokens are its own; but they are as many as were asked for, and the same every time."""
    command = [
        *(sys.executable, "-m", "bench.transformers_peer", str(model.path)),
        *("--page-size", "16", "--num-tokens", "2048"),
    ]
    engine = await PipedEngine.start("transformers", command, ENVIRONMENT, SERVED, 90.0)
    try:
        assert engine.facts["engine"].startswith("transformers ")
        found = [await answer(engine, model.prompts[0], 8) for _ in range(2)]
        counts = await asyncio.gather(*(answer(engine, prompt, 5) for prompt in model.prompts))
    finally:
        await engine.close()
    assert found[0] == found[1]
    assert len(found[0][0]) == 8
    assert [len(tokens) for tokens, _ in counts] == [5] * len(model.prompts)

"""Real workers with weights of int8: every way to an answer is the rounded model's own, and none leads to the exact model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from kvpool.client import Completion, InvalidRequest
from kvpool.worker_service.engine.step import SequencePart, Step
from kvpool.worker_service.model.forward.kv_plan import KVCachePlan
from kvpool.worker_service.model.load import load_model
from kvpool.worker_service.model.settings import ModelSettings, QuantizationName
from tests.cluster.cluster import Cluster
from tests.cluster.models import make_endless_model
from tests.cluster.polling import eventually
from tests.load.judge import Delivered
from tests.model.paged import GREEDY
from tests.tiny_models import TinyModel

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.native,
]

NUM_TOKENS = 24
NUM_OF_STREAM = 150
KILLED_AT: Final = (10, 50)
"""Tokens that a stream has delivered when the worker that sends it is killed."""
BLOCK_SIZE = 4
WORKER: Final[dict[str, Any]] = {
    "runtime": "native",
    "dtype": "bfloat16",
    "block_size": BLOCK_SIZE,
    "num_blocks": 1025,
    "step_seconds": 0.01,  # a stream is killed in its middle
}
INT8: Final = {**WORKER, "quantize": "int8"}
CHUNKS: Final = {"max_num_batched_tokens": 7, "max_num_seqs": 5}
"""All prompts but one are longer than a step takes."""


def alone(
    model: Path, prompts: Sequence[Sequence[int]], num_tokens: int, quantize: QuantizationName = "int8"
) -> list[list[int]]:
    """Greedy texts without a cluster: each prompt in one step, and then one token after the other."""
    settings = ModelSettings(str(model), "bfloat16", "cpu", runtime="native", quantize=quantize, num_threads=1)
    loaded = load_model(settings, lambda line: None)
    num_blocks = -(-(max(map(len, prompts)) + num_tokens) // BLOCK_SIZE)
    runner = loaded.runner(KVCachePlan.one_group(num_blocks + 1, BLOCK_SIZE, 1))
    table = list(range(1, num_blocks + 1))
    texts = []
    for prompt in prompts:
        tokens, num_computed = list(prompt), 0
        while len(tokens) < len(prompt) + num_tokens:
            (result,) = runner.execute(Step([SequencePart(tokens[num_computed:], num_computed, (table,), GREEDY)]))
            assert result.token is not None
            num_computed = len(tokens)
            tokens.append(result.token.token_id)
        texts.append(tokens[len(prompt) :])
    runner.close()
    return texts


@dataclass(frozen=True)
class Subject:
    """The workers rounded and exact serve one model: the one in int8 and in chunks, the other with the weights as they are."""

    cluster: Cluster
    model: TinyModel
    rounded: str
    """Fingerprint."""
    exact: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    folder = tmp_path_factory.mktemp("int8")
    model = make_endless_model(folder / "endless")
    async with Cluster(folder, lease_seconds=2.0, keep_alive_seconds=0.2) as cluster:
        await cluster.start(
            {"rounded": {"model": model.path, **INT8, **CHUNKS}, "exact": {"model": model.path, **WORKER}}
        )
        rounded, exact = [(await cluster.worker(name)).model_fingerprint for name in ("rounded", "exact")]
        yield Subject(cluster, model, rounded, exact)


def texts_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]


async def test_alone_batched_cold_and_warm_every_text_is_that_of_the_rounded_model(subject: Subject) -> None:
    cluster, prompts = subject.cluster, subject.model.prompts
    truth = alone(subject.model.path, prompts, NUM_TOKENS)
    one_by_one = [
        await cluster.complete(prompt, model=subject.rounded, max_tokens=NUM_TOKENS, tenant_salt=str(index))
        for index, prompt in enumerate(prompts)
    ]
    assert [answer.num_cached_tokens for answer in one_by_one] == [0] * len(prompts)
    cold, warm = [
        await cluster.all_at_once(prompts, model=subject.rounded, max_tokens=NUM_TOKENS, logprobs=0) for _ in range(2)
    ]
    assert all(answer.num_cached_tokens for answer in warm)
    for answers in (one_by_one, cold, warm):
        assert texts_of(answers) == truth
        assert {answer.worker_id for answer in answers} == {"rounded"}
    assert [answer.logprobs for answer in warm] == [answer.logprobs for answer in cold]
    exact = await cluster.all_at_once(prompts, model=subject.exact, max_tokens=NUM_TOKENS)
    assert texts_of(exact) == alone(subject.model.path, prompts, NUM_TOKENS, "none") != truth
    assert {answer.worker_id for answer in exact} == {"exact"}
    with pytest.raises(InvalidRequest, match="several models are served"):
        await cluster.complete(prompts[0])


async def test_streams_continue_at_int8_workers_only(subject: Subject) -> None:
    """Two int8 workers, which cut prompts otherwise, die one after the other; the exact one is there all the time."""
    cluster, prompt = subject.cluster, subject.model.prompts[2]
    (truth,) = alone(subject.model.path, [prompt], NUM_OF_STREAM)
    cluster.start_worker("second", model=subject.model.path, **INT8)
    await cluster.until_registered("second")

    async def only_exact() -> bool:
        return [worker.worker_id for worker in await cluster.describe()] == ["exact"]

    delivered, killed = Delivered(), list[str]()
    async with cluster.client(worker_wait=240.0) as client:
        async for chunk in client.generate(prompt, model=subject.rounded, max_tokens=NUM_OF_STREAM, ignore_eos=True):
            delivered.add(chunk)
            if len(killed) < len(KILLED_AT) and len(delivered.tokens) >= KILLED_AT[len(killed)]:
                killed.append(delivered.workers[-1])
                cluster.kill(killed[-1])
                if len(killed) == len(KILLED_AT):
                    await eventually(only_exact, "the leases of both end")
                    cluster.start_worker(killed[0])
    assert delivered.workers == [*killed, killed[0]]
    assert set(killed) == {"rounded", "second"}
    assert (delivered.tokens, delivered.misplaced) == (truth, [])

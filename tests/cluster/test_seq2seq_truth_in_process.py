"""Encoder-decoder models in a cluster: in float32 the tokens are those of transformers' generate, whatever is cached of them.

The tests of t5 share a cluster with room, and one without; a test that needs an empty cache has a tenant of its own. What bart does
otherwise is in the model, so its texts are compared once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import torch

from kvpool.client import InvalidRequest
from kvpool.worker_service.engine.request import GenerationParams, Request
from kvpool.worker_service.model.guard.tiny_replica import NUM_PLAIN_TOKENS, replica_config
from scripts.models.subjects import default_seq2seq_config
from scripts.models.trial import save
from tests.cluster.in_process import InProcessCluster, in_process_cluster
from tests.cluster.truth import NUM_TOP, Truth, check_all
from tests.gateway.serving import http_client, serving
from tests.lockstep import in_lockstep
from tests.model.paged_seq2seq import Oracle
from tests.tiny_models import MIN_MARGIN
from tests.worker_service.world import read

# transformers' own modules, imported by these models, annotate in a way that torch deprecates.
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
]

NUM_NEW = 12
LENGTHS = (5, 23, 40, 9)
SETTINGS = {"block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 32, "max_num_seqs": 8, "cross_blocks": 129}
"""The cross group has room for the inputs of all tests."""


class Subject(NamedTuple):
    """A tiny model, and what it must answer."""

    path: Path
    oracle: Oracle
    start: list[int]
    """What its texts begin with."""
    truths: list[Truth]
    """Of inputs that prove something."""


def numbers(length: int, seed: int) -> tuple[int, ...]:
    """An input of the encoder."""
    draw = random.Random(seed)
    return tuple(draw.randrange(16, NUM_PLAIN_TOKENS) for _ in range(length))


def make_subject(kind: str, folder: Path) -> Subject:
    config = replica_config(default_seq2seq_config(kind), 1 << 20)
    save(config, folder)
    oracle = Oracle.of(folder)
    start = [config.decoder_start_token_id]
    truths = [
        next(found for seed in range(50) if (found := truth_of(oracle, start, numbers(length, seed))))
        for length in LENGTHS
    ]
    return Subject(folder, oracle, start, truths)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject("t5", tmp_path_factory.mktemp("t5"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InProcessCluster]:
    async with in_process_cluster(subject.path, tmp_path_factory.mktemp("roomy"), **SETTINGS) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InProcessCluster]:
    """The decoder's pool has room for two texts and a half, the cross group for one long input at a time."""
    settings = {**SETTINGS, "num_blocks": 9, "cross_blocks": 12, "max_model_len": 20, "reserve_seconds": 0.0}
    async with in_process_cluster(subject.path, tmp_path_factory.mktemp("tight"), **settings) as started:
        yield started


def truth_of(oracle: Oracle, start: Sequence[int], prompt: Sequence[int]) -> Truth | None:
    """What `generate` gives for an input; None if rounding may turn a token into another."""
    tokens, logits = oracle.logits(prompt, NUM_NEW, start)
    best = torch.log_softmax(logits, dim=-1).topk(NUM_TOP, dim=-1).values
    if float((best[:, 0] - best[:, 1]).min()) < MIN_MARGIN:
        return None
    return Truth(tuple(prompt), tokens, best.tolist())


def prompts_of(subject: Subject) -> list[tuple[int, ...]]:
    """The inputs of the encoder."""
    return [truth.prompt for truth in subject.truths]


def continued(
    cluster: InProcessCluster, subject: Subject, truth: Truth, name: str, num_delivered: int, salt: str
) -> Request:
    """The request of a client whose stream broke off on another worker, at the engine."""
    return cluster.worker.engine.submit(
        GenerationParams(
            name,
            2,
            [*subject.start, *truth.tokens[:num_delivered]],
            num_delivered_tokens=num_delivered,
            encoder_token_ids=list(truth.prompt),
            max_tokens=NUM_NEW - num_delivered,
            ignore_eos=True,
            tenant_salt=salt,
        )
    )


async def check_cold_warm_and_alone(cluster: InProcessCluster, subject: Subject) -> None:
    for _ in range(2):
        answers = await cluster.all_at_once(prompts_of(subject), max_tokens=NUM_NEW, logprobs=NUM_TOP)
        check_all(subject.truths, answers)
    truth = subject.truths[1]
    alone = await cluster.complete(truth.prompt, max_tokens=NUM_NEW, logprobs=NUM_TOP)
    truth.check(alone)
    assert alone.num_cached_tokens == len(truth.prompt), "its encoder did not run again"


async def test_cold_warm_and_in_company_the_tokens_are_those_of_generate(
    cluster: InProcessCluster, subject: Subject
) -> None:
    await check_cold_warm_and_alone(cluster, subject)


async def test_those_of_bart_too(tmp_path: Path) -> None:
    bart = make_subject("bart", tmp_path / "bart")
    async with in_process_cluster(bart.path, tmp_path, **SETTINGS) as cluster:
        await check_cold_warm_and_alone(cluster, bart)


async def test_equal_inputs_at_once_run_the_encoder_once(cluster: InProcessCluster, subject: Subject) -> None:
    truth = subject.truths[2]
    before = cluster.worker.engine.stats.num_forwarded_tokens
    answers = await cluster.all_at_once(
        [truth.prompt] * 3, max_tokens=NUM_NEW, logprobs=NUM_TOP, tenant_salt="equal inputs"
    )
    check_all([truth] * 3, answers)
    assert cluster.worker.engine.stats.num_forwarded_tokens - before == len(truth.prompt) + 3 * NUM_NEW


async def test_an_evicted_unit_is_computed_again_while_the_decoder_hits(
    tight: InProcessCluster, subject: Subject
) -> None:
    truth, other = subject.truths[2], subject.truths[1]
    for one in (truth, other):
        answer = await tight.complete(one.prompt, max_tokens=NUM_NEW, logprobs=NUM_TOP, tenant_salt="evicted")
        one.check(answer)
    await tight.until_idle()
    before = tight.worker.engine.stats.num_forwarded_tokens
    request = continued(tight, subject, truth, "continued", 9, "evicted")
    assert await read(request) == truth.tokens[9:]
    assert (request.sequence.num_cached_tokens, request.sequence.encoder_cached) == (8, False)
    num_forwarded = tight.worker.engine.stats.num_forwarded_tokens - before
    assert num_forwarded == len(truth.prompt) + (1 + 9) - 8 + 2
    assert tight.manager.manager.sessions[0].pools[1].num_evicted > 0


async def test_what_was_delivered_elsewhere_is_gone_on_with(cluster: InProcessCluster, subject: Subject) -> None:
    requests = [
        continued(cluster, subject, truth, f"s{number}", 3 + number, "elsewhere")
        for number, truth in enumerate(subject.truths)
    ]
    found = await asyncio.gather(*map(read, requests))
    assert found == [truth.tokens[3 + number :] for number, truth in enumerate(subject.truths)]


async def test_preempted_the_tokens_are_those_of_generate(tight: InProcessCluster, subject: Subject) -> None:
    """Three inputs fit into the cross group together, and their texts not into the other: one is computed again, with the encoder's
    output of its first round. The longest then waits for room in the cross group."""
    truths = [subject.truths[number] for number in (0, 1, 3, 2)]
    async with in_lockstep(tight.worker.engine, len(truths)):
        answers = await tight.all_at_once(
            [truth.prompt for truth in truths], max_tokens=NUM_NEW, logprobs=NUM_TOP, tenant_salt="preempted"
        )
    check_all(truths, answers)
    assert sum(answer.num_preemptions for answer in answers) > 0


async def test_the_manager_shows_the_group_and_explains_what_is_there(
    cluster: InProcessCluster, subject: Subject
) -> None:
    truth = subject.truths[1]
    before = (await cluster.describe()).counts[1].cached
    await cluster.complete(truth.prompt, max_tokens=NUM_NEW, tenant_salt="shown")
    await cluster.until_idle()
    worker = await cluster.describe()
    spec = worker.kv_cache_config.groups[1]
    assert spec.WhichOneof("spec") == "cross_attention"
    assert worker.counts[1].cached - before == -(-len(truth.prompt) // 4)
    assert spec.cross_attention.max_encoder_tokens >= max(LENGTHS)
    explained = await cluster.client.explain(truth.prompt, tenant_salt="shown")
    assert (explained.num_encoder_tokens, explained.workers[0].encoder_cached) == (len(truth.prompt), True)
    other = await cluster.client.explain(subject.truths[0].prompt, tenant_salt="shown")
    assert not other.workers[0].encoder_cached
    assert "has the encoder's output for the 23 tokens" in explained.sentences()[0]


async def test_what_such_a_model_does_not_do_is_refused_with_the_reason(
    cluster: InProcessCluster, subject: Subject
) -> None:
    model = await cluster.client.model()
    assert model.encoder is not None
    assert list(model.encoder.decoder_prompt) == subject.start
    with pytest.raises(InvalidRequest, match="does not chat"):
        await cluster.client.chat([{"role": "user", "content": "Hello"}]).collect()
    with pytest.raises(InvalidRequest, match="feeds its encoder"):
        await cluster.complete([20, 21], prompt_logprobs=0)
    too_long = [20] * (model.encoder.max_tokens + 1)
    with pytest.raises(InvalidRequest, match=f"takes {model.encoder.max_tokens}"):
        await cluster.complete(too_long)


async def test_openais_completions_feed_the_encoder_and_the_rest_is_refused(
    cluster: InProcessCluster, subject: Subject
) -> None:
    truth = subject.truths[1]
    body = {"prompt": list(truth.prompt), "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    async with (
        serving(f"127.0.0.1:{cluster.manager.port}") as gateway,
        http_client(gateway.url, timeout=60) as http,
    ):
        for num_cached in (0, len(truth.prompt)):
            asked = {**body, "return_token_ids": True, "cache_salt": "openai"}
            answer = (await http.post("/v1/completions", json=asked)).json()
            assert answer["choices"][0]["token_ids"] == truth.tokens
            usage = answer["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(truth.prompt), NUM_NEW)
            assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached
        for field, value in (("echo", True), ("prompt_logprobs", 0)):
            refused = await http.post("/v1/completions", json={**body, field: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
            assert "feeds its encoder" in refused.json()["error"]["message"]
        chat = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}]})
        assert (chat.status_code, "does not chat" in chat.json()["error"]["message"]) == (400, True)


async def test_beams_and_answers_share_their_encoders_output_and_are_preempted(
    tight: InProcessCluster, subject: Subject
) -> None:
    prompts = prompts_of(subject)[:2]
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": NUM_NEW, "ignore_eos": True}
    searched = [
        tight.client.generate(prompt, n=2, num_beams=2, max_tokens=NUM_NEW, ignore_eos=True).collect_all()
        for prompt in prompts
    ]
    several = [tight.client.generate(prompt, n=3, seed=7, **sampled).collect_all() for prompt in prompts]
    async with in_lockstep(tight.worker.engine, len(searched) + len(several)):
        found = await asyncio.gather(*searched, *several)
    for prompt, answers in zip(prompts, found[: len(searched)], strict=True):
        expected = subject.oracle.beams(prompt, NUM_NEW, subject.start, 2)
        assert [list(answer.token_ids) for answer in answers] == [beam.tokens for beam in expected]
        assert [answer.score for answer in answers] == pytest.approx([beam.score for beam in expected], rel=1e-4)
    for index in range(3):
        alone = await tight.all_at_once(prompts, seed=7 + index, **sampled)
        assert [answers[index].token_ids for answers in found[len(searched) :]] == [one.token_ids for one in alone]
    assert sum(answer.num_preemptions for answers in found for answer in answers) > 0

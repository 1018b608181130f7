"""Encoder-decoder models in a cluster: in float32 the tokens are those of transformers' generate, whatever is cached of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from kvpool.client import InvalidRequest
from kvpool.worker_service.engine.request import GenerationParams, Request
from kvpool.worker_service.model.guard.tiny_replica import NUM_PLAIN_TOKENS, replica_config
from scripts.models.subjects import default_seq2seq_config
from scripts.models.trial import save
from tests.cluster.in_process import InProcessCluster, in_process_cluster
from tests.cluster.truth import NUM_TOP, Truth, check_all
from tests.gateway.serving import serving
from tests.lockstep import in_lockstep
from tests.model.paged_seq2seq import Oracle
from tests.tiny_models import MIN_MARGIN
from tests.worker_service.world import read

# transformers' own modules, imported by these models, annotate in a way that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

KINDS = ("t5", "bart")
NUM_NEW = 12
LENGTHS = (5, 23, 40, 9, 17)
SETTINGS = {"block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 32, "max_num_seqs": 8, "cross_blocks": 65}


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


@pytest.fixture(scope="module", params=KINDS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp(request.param)
    config = replica_config(default_seq2seq_config(request.param), 1 << 20)
    save(config, folder)
    oracle = Oracle.of(folder)
    start = [config.decoder_start_token_id]
    truths = [
        next(found for seed in range(50) if (found := truth_of(oracle, start, numbers(length, seed))))
        for length in LENGTHS
    ]
    return Subject(folder, oracle, start, truths)


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


def continued(cluster: InProcessCluster, subject: Subject, truth: Truth, name: str, num_delivered: int) -> Request:
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
        )
    )


async def test_cold_warm_and_in_company_the_tokens_are_those_of_generate(subject: Subject, tmp_path: Path) -> None:
    async with in_process_cluster(subject.path, tmp_path, **SETTINGS) as cluster:
        for _ in range(2):
            answers = await cluster.all_at_once(prompts_of(subject), max_tokens=NUM_NEW, logprobs=NUM_TOP)
            check_all(subject.truths, answers)
        for truth in subject.truths:
            alone = await cluster.complete(truth.prompt, max_tokens=NUM_NEW, logprobs=NUM_TOP)
            truth.check(alone)
            assert alone.num_cached_tokens == len(truth.prompt), "its encoder did not run again"


async def test_equal_inputs_at_once_run_the_encoder_once(subject: Subject, tmp_path: Path) -> None:
    truth = subject.truths[2]
    async with in_process_cluster(subject.path, tmp_path, **SETTINGS) as cluster:
        answers = await cluster.all_at_once([truth.prompt] * 6, max_tokens=NUM_NEW, logprobs=NUM_TOP)
        check_all([truth] * 6, answers)
        assert cluster.worker.engine.stats.num_forwarded_tokens == len(truth.prompt) + 6 * NUM_NEW


async def test_an_evicted_unit_is_computed_again_while_the_decoder_hits(subject: Subject, tmp_path: Path) -> None:
    """The cross group has room for one input at a time."""
    truth, other = subject.truths[2], subject.truths[1]
    async with in_process_cluster(subject.path, tmp_path, **{**SETTINGS, "cross_blocks": 12}) as cluster:
        for one in (truth, other):
            one.check(await cluster.complete(one.prompt, max_tokens=NUM_NEW, logprobs=NUM_TOP))
        await cluster.until_idle()
        before = cluster.worker.engine.stats.num_forwarded_tokens
        request = continued(cluster, subject, truth, "continued", 9)
        assert await read(request) == truth.tokens[9:]
        assert (request.sequence.num_cached_tokens, request.sequence.encoder_cached) == (8, False)
        num_forwarded = cluster.worker.engine.stats.num_forwarded_tokens - before
        assert num_forwarded == len(truth.prompt) + (1 + 9) - 8 + 2
        assert cluster.manager.manager.sessions[0].pools[1].num_evicted > 0


async def test_what_was_delivered_elsewhere_is_gone_on_with(subject: Subject, tmp_path: Path) -> None:
    async with in_process_cluster(subject.path, tmp_path, **SETTINGS) as cluster:
        requests = [
            continued(cluster, subject, truth, f"s{number}", 3 + number) for number, truth in enumerate(subject.truths)
        ]
        found = await asyncio.gather(*map(read, requests))
        assert found == [truth.tokens[3 + number :] for number, truth in enumerate(subject.truths)]


async def test_preempted_the_tokens_are_those_of_generate(subject: Subject, tmp_path: Path) -> None:
    """The decoder's pool is too small for all: some are computed again, with the encoder's output of their first round."""
    tight = {**SETTINGS, "num_blocks": 8, "max_model_len": 20, "reserve_seconds": 0.0}
    async with in_process_cluster(subject.path, tmp_path, **tight) as cluster:
        async with in_lockstep(cluster.worker.engine, len(LENGTHS)):
            answers = await cluster.all_at_once(prompts_of(subject), max_tokens=NUM_NEW, logprobs=NUM_TOP)
        check_all(subject.truths, answers)
        assert sum(answer.num_preemptions for answer in answers) > 0


async def test_pools_that_are_small_alone_change_no_token(subject: Subject, tmp_path: Path) -> None:
    async with in_process_cluster(subject.path, tmp_path, **{**SETTINGS, "cross_blocks": 12}) as cluster:
        for _ in range(2):
            answers = await cluster.all_at_once(prompts_of(subject), max_tokens=NUM_NEW, logprobs=NUM_TOP)
            check_all(subject.truths, answers)


async def test_the_manager_shows_the_group_and_explains_what_is_there(subject: Subject, tmp_path: Path) -> None:
    truth = subject.truths[1]
    async with in_process_cluster(subject.path, tmp_path, **SETTINGS) as cluster:
        await cluster.complete(truth.prompt, max_tokens=NUM_NEW)
        await cluster.until_idle()
        worker = await cluster.describe()
        spec = worker.kv_cache_config.groups[1]
        assert (spec.WhichOneof("spec"), worker.counts[1].cached) == ("cross_attention", -(-len(truth.prompt) // 4))
        assert spec.cross_attention.max_encoder_tokens >= max(LENGTHS)
        explained = await cluster.client.explain(truth.prompt)
        assert (explained.num_encoder_tokens, explained.workers[0].encoder_cached) == (len(truth.prompt), True)
        assert not (await cluster.client.explain(subject.truths[0].prompt)).workers[0].encoder_cached
        assert "has the encoder's output for the 23 tokens" in explained.sentences()[0]


async def test_what_such_a_model_does_not_do_is_refused_with_the_reason(subject: Subject, tmp_path: Path) -> None:
    async with in_process_cluster(subject.path, tmp_path, **SETTINGS) as cluster:
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


async def test_openais_completions_feed_the_encoder_and_the_rest_is_refused(subject: Subject, tmp_path: Path) -> None:
    truth = subject.truths[1]
    body = {"prompt": list(truth.prompt), "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    async with (
        in_process_cluster(subject.path, tmp_path, **SETTINGS) as cluster,
        serving(f"127.0.0.1:{cluster.manager.port}") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):
        for num_cached in (0, len(truth.prompt)):
            answer = (await http.post("/v1/completions", json={**body, "return_token_ids": True})).json()
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


@pytest.mark.parametrize("num_blocks", [257, 25])
async def test_beams_and_answers_share_their_encoders_output(subject: Subject, num_blocks: int, tmp_path: Path) -> None:
    """In a tight pool they are preempted, and find the same."""
    prompts = prompts_of(subject)[:3]
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": NUM_NEW, "ignore_eos": True}
    async with in_process_cluster(subject.path, tmp_path, **SETTINGS, num_blocks=num_blocks) as cluster:
        searched = [
            cluster.client.generate(prompt, n=3, num_beams=3, max_tokens=NUM_NEW, ignore_eos=True).collect_all()
            for prompt in prompts
        ]
        several = [cluster.client.generate(prompt, n=3, seed=7, **sampled).collect_all() for prompt in prompts]
        found = await asyncio.gather(*searched, *several)
        for prompt, answers in zip(prompts, found[: len(searched)], strict=True):
            expected = subject.oracle.beams(prompt, NUM_NEW, subject.start, 3)
            assert [list(answer.token_ids) for answer in answers] == [beam.tokens for beam in expected]
            assert [answer.score for answer in answers] == pytest.approx([beam.score for beam in expected], rel=1e-4)
        for index in range(3):
            alone = await cluster.all_at_once(prompts, seed=7 + index, **sampled)
            assert [answers[index].token_ids for answers in found[len(searched) :]] == [one.token_ids for one in alone]

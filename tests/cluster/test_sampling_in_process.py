"""Every sampling option, over the wire and in one batch with all others: in float32 the text of a plain loop over eager logits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import grpc.aio
import pytest
import pytest_asyncio
import torch

from kvpool.client import Completion, GenerateOptions
from kvpool.client.request import attempt_request, build_request
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.in_process import TIGHT, InProcessCluster, in_process_cluster
from tests.cluster.truth import LOGPROB_TOLERANCE
from tests.lockstep import in_lockstep
from tests.model.plain_loop import PlainLoop
from tests.tiny_models import EOS_TOKEN_ID, TinyModel, make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_NEW = 16

OPTIONS: dict[str, GenerateOptions] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top_k": {"temperature": 1.0, "top_k": 5, "seed": 2},
    "top_p": {"temperature": 1.5, "top_p": 0.75, "seed": 3},
    "min_p": {"temperature": 2.0, "min_p": 0.25, "seed": 4},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {7: 2.5, 200: 4.0, 33: -100.0}, "temperature": 0.5, "seed": 5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "runs of two": {"no_repeat_ngram_size": 2, "temperature": 0.7, "top_k": 3, "seed": 6},
    "runs of the prompt": {"encoder_no_repeat_ngram_size": 1, "temperature": 3.0, "seed": 7},
    "ids that must not follow": {
        "suppress_tokens": range(0, 256, 3), "begin_suppress_tokens": range(1, 256, 3),
        "bad_words_ids": [[first, second] for first in range(1, 256, 3) for second in range(2, 60, 3)] + [[61]],
    },
    "all": {
        "temperature": 1.25, "top_k": 40, "top_p": 0.875, "min_p": 0.0625, "repetition_penalty": 1.25,
        "presence_penalty": 0.5, "frequency_penalty": -0.25, "logit_bias": {9: 1.5}, "seed": 2**64 - 1,
        "no_repeat_ngram_size": 3, "suppress_tokens": [4, 8],
    },
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A tiny model and what is known of it."""

    tiny: TinyModel
    loop: PlainLoop

    @property
    def cases(self) -> Iterator[tuple[tuple[int, ...], GenerateOptions]]:
        """All options with two prompts that begin alike."""
        return ((prompt, options) for options in OPTIONS.values() for prompt in self.tiny.prompts[1:3])

    def check(self, prompt: Sequence[int], options: GenerateOptions, completion: Completion) -> None:
        """The answer is NUM_NEW tokens of the plain loop. One forward pass, where `PlainLoop.text` makes one for each token."""
        assert len(completion.token_ids) == NUM_NEW
        assert list(self.loop.differences(prompt, options, completion.token_ids)) == [], options


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """gemma2: it caps its logits behind the head."""
    folder = tmp_path_factory.mktemp("gemma2")
    tiny = make_tiny_model("gemma2", folder, tokenizer=True, eos_token_id=EOS_TOKEN_ID)
    return Subject(tiny, PlainLoop(tiny.path))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InProcessCluster]:
    """Its pool has room for all."""
    async with in_process_cluster(subject.tiny.path, tmp_path_factory.mktemp("roomy")) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InProcessCluster]:
    """Its pool holds the longest sequence and never all; chunks of 7."""
    async with in_process_cluster(subject.tiny.path, tmp_path_factory.mktemp("tight"), **TIGHT) as started:
        yield started


async def test_every_option_is_the_plain_loop_in_a_tight_pool(subject: Subject, tight: InProcessCluster) -> None:
    """Twenty-eight requests with all options, five at a time, in chunks, with hits, evictions and preemptions on the way."""
    cases = list(subject.cases)
    async with in_lockstep(tight.worker.engine, len(cases)):
        completions = await asyncio.gather(
            *(tight.complete(prompt, **(options | GenerateOptions(max_tokens=NUM_NEW))) for prompt, options in cases)
        )
    for (prompt, options), completion in zip(cases, completions, strict=True):
        subject.check(prompt, options, completion)
    assert sum(completion.num_preemptions for completion in completions) > 0


@pytest.mark.parametrize("name", ["frequency_penalty", "ids that must not follow", "all"])
async def test_a_continuation_counts_what_was_delivered_as_generated(
    subject: Subject, cluster: InProcessCluster, name: str
) -> None:
    """Cut behind tokens of all blocks: the rest is that of the undisturbed text, and neither prompt nor echo is told again."""
    options, prompt = OPTIONS[name], subject.tiny.prompts[1]
    asked = build_request({**options, "max_tokens": NUM_NEW, "echo": True, "prompt_logprobs": 0, "tenant_salt": name})
    async with grpc.aio.insecure_channel(cluster.worker.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)

        async def told_after(delivered: Sequence[int]) -> list[worker_pb2.GenerateResponse]:
            request = attempt_request(
                asked,
                token_ids=[*prompt, *delivered],
                num_delivered=len(delivered),
                sequence_id=f"cut-{len(delivered)}",
                attempt=1,
                model_fingerprint="",
            )
            request.stop.ignore_eos = True
            return [message async for message in stub.Generate(request)]

        # The whole text first: the others find its prompt in the cache.
        whole = await told_after(())
        right = [token for message in whole for token in message.token_ids]
        assert len(right) == NUM_NEW
        assert list(subject.loop.differences(prompt, options, right)) == []
        cuts = (1, 2, 5, 8, NUM_NEW - 1)
        continuations = await asyncio.gather(*(told_after(right[:cut]) for cut in cuts))
        whole_text = "".join(message.text for message in whole)
        for cut, told in zip((0, *cuts), [whole, *continuations], strict=True):
            assert [token for message in told for token in message.token_ids] == right[cut:]
            assert whole_text.endswith("".join(message.text for message in told))
            num_told = sum(len(message.prompt_logprobs) for message in told)
            assert (num_told, told[0].usage.num_cached_tokens > 0) == ((len(prompt), False) if cut == 0 else (0, True))


async def test_prompt_logprobs_are_those_of_eager_logits(subject: Subject, cluster: InProcessCluster) -> None:
    """With the rows of a step in slices; nothing of it is taken from the cache, and what it has computed is there for others."""
    await check_prompt_logprobs_of_all(subject, cluster, 3)
    after = await cluster.complete(subject.tiny.prompts[3], max_tokens=1)
    assert after.prompt_logprobs is None
    assert after.num_cached_tokens > 0


async def test_prompt_logprobs_are_told_once_by_those_that_are_preempted(
    subject: Subject, tight: InProcessCluster
) -> None:
    """In chunks, and in slices of them."""
    async with in_lockstep(tight.worker.engine, len(prompts_of(subject))):
        assert await check_prompt_logprobs_of_all(subject, tight, 2) > 0


def prompts_of(subject: Subject) -> list[tuple[int, ...]]:
    """One token among them, of which nothing is told."""
    return [*subject.tiny.prompts, (5,)]


async def check_prompt_logprobs_of_all(subject: Subject, cluster: InProcessCluster, max_prompt_rows: int) -> int:
    """Of all prompts at once; returns how many preemptions there were."""
    prompts, runner = prompts_of(subject), cluster.worker.runner
    usual, runner._max_prompt_rows = runner._max_prompt_rows, max_prompt_rows
    completions = await cluster.all_at_once(prompts, max_tokens=NUM_NEW, prompt_logprobs=2)
    runner._max_prompt_rows = usual
    for prompt, completion in zip(prompts, completions, strict=True):
        check_prompt_logprobs(completion, prompt, subject.loop.logits(prompt))
        assert completion.num_cached_tokens == 0
        subject.check(prompt, {}, completion)
    return sum(completion.num_preemptions for completion in completions)


def check_prompt_logprobs(completion: Completion, prompt: Sequence[int], logits: torch.Tensor) -> None:
    expected = torch.log_softmax(logits, dim=-1)
    told = completion.prompt_logprobs
    assert told is not None
    assert len(told) == len(prompt)
    assert told[0] is None
    for position in range(1, len(prompt)):
        entry, row = told[position], expected[position - 1]
        assert entry is not None
        assert entry.logprob == pytest.approx(float(row[prompt[position]]), abs=LOGPROB_TOLERANCE)
        best = row.topk(2).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=LOGPROB_TOLERANCE)


async def test_stop_ids_wait_for_min_tokens(subject: Subject, cluster: InProcessCluster) -> None:
    """They are not drawn before, so the text is another one from there on; then they end it."""
    prompt = subject.tiny.prompts[0]
    free = subject.loop.text(prompt, {}, 3)
    stops: GenerateOptions = {"stop_token_ids": sorted(set(free)), "max_tokens": 24}
    at_once = await cluster.complete(prompt, **stops)
    assert (list(at_once.token_ids), at_once.finish_reason) == ([], "stop")
    for min_tokens in (1, 9):
        options: GenerateOptions = {**stops, "min_tokens": min_tokens}
        completion = await cluster.complete(prompt, **options)
        assert list(completion.token_ids) == subject.loop.text(prompt, options, 24)
        assert len(completion.token_ids) >= min_tokens


async def test_echo_begins_the_text_with_the_prompt(cluster: InProcessCluster) -> None:
    plain = await cluster.complete("hello, ", max_tokens=8)
    echoed = await cluster.complete("hello, ", max_tokens=8, echo=True)
    assert echoed.text == "hello, " + plain.text
    assert echoed.token_ids == plain.token_ids
    # A text that ends before its first token still begins with the prompt.
    ended = await cluster.complete("hello, ", stop_token_ids=plain.token_ids[:1], echo=True)
    assert (ended.text, ended.token_ids) == ("hello, ", ())

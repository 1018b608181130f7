"""Every sampling option, over the wire and in one batch with all others: in float32 the text of a plain loop over eager logits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
import torch

from kvpool.client import Completion, GenerateOptions
from kvpool.client.request import attempt_request, build_request
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.in_process import TIGHT, in_process_cluster
from tests.cluster.truth import LOGPROB_TOLERANCE
from tests.lockstep import in_lockstep
from tests.model.plain_loop import PlainLoop
from tests.tiny_models import EOS_TOKEN_ID, TinyModel, make_tiny_model

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
        """All options with three prompts, two of which begin alike."""
        return ((prompt, options) for options in OPTIONS.values() for prompt in self.tiny.prompts[1:4])

    def check(self, prompt: Sequence[int], options: GenerateOptions, completion: Completion) -> None:
        """The answer is NUM_NEW tokens of the plain loop. One forward pass, where `PlainLoop.text` makes one for each token."""
        assert len(completion.token_ids) == NUM_NEW
        assert list(self.loop.differences(prompt, options, completion.token_ids)) == [], options


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """gemma2 caps its logits behind the head."""
    tiny = make_tiny_model(
        request.param, tmp_path_factory.mktemp(request.param), tokenizer=True, eos_token_id=EOS_TOKEN_ID
    )
    return Subject(tiny, PlainLoop(tiny.path))


async def test_every_option_is_the_plain_loop_in_a_tight_pool(subject: Subject, tmp_path: Path) -> None:
    """Forty-two requests with all options, five at a time, in chunks, with hits, evictions and preemptions on the way."""
    cases = list(subject.cases)
    async with in_process_cluster(subject.tiny.path, tmp_path, **TIGHT) as cluster:
        async with in_lockstep(cluster.worker.engine, len(cases)):
            completions = await asyncio.gather(
                *(
                    cluster.complete(prompt, **(options | GenerateOptions(max_tokens=NUM_NEW)))
                    for prompt, options in cases
                )
            )
        for (prompt, options), completion in zip(cases, completions, strict=True):
            subject.check(prompt, options, completion)
        assert sum(completion.num_preemptions for completion in completions) > 0


@pytest.mark.parametrize("name", ["frequency_penalty", "ids that must not follow", "runs of the prompt", "all"])
async def test_a_continuation_counts_what_was_delivered_as_generated(
    subject: Subject, name: str, tmp_path: Path
) -> None:
    """Cut behind every token: the rest is that of the undisturbed text, and neither prompt nor echo is told again."""
    options, prompt = OPTIONS[name], subject.tiny.prompts[1]
    asked = build_request({**options, "max_tokens": NUM_NEW, "echo": True, "prompt_logprobs": 0})
    right = subject.loop.text(prompt, options, NUM_NEW)
    async with (
        in_process_cluster(subject.tiny.path, tmp_path) as cluster,
        grpc.aio.insecure_channel(cluster.worker.address) as channel,
    ):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)

        async def told_after(cut: int) -> list[worker_pb2.GenerateResponse]:
            request = attempt_request(
                asked,
                token_ids=[*prompt, *right[:cut]],
                num_delivered=cut,
                sequence_id=f"cut-{cut}",
                attempt=1,
                model_fingerprint="",
            )
            request.stop.ignore_eos = True
            return [message async for message in stub.Generate(request)]

        # The whole text first: the others find its prompt in the cache.
        whole = await told_after(0)
        continuations = await asyncio.gather(*(told_after(cut) for cut in range(1, NUM_NEW)))
        whole_text = "".join(message.text for message in whole)
        for cut, told in enumerate([whole, *continuations]):
            assert [token for message in told for token in message.token_ids] == right[cut:]
            assert whole_text.endswith("".join(message.text for message in told))
            num_told = sum(len(message.prompt_logprobs) for message in told)
            assert (num_told, told[0].usage.num_cached_tokens > 0) == ((len(prompt), False) if cut == 0 else (0, True))


@pytest.mark.parametrize(("settings", "max_prompt_rows"), [
    ({"max_num_batched_tokens": 1, "max_num_seqs": 1}, 64),
    ({"max_num_batched_tokens": 7, "max_num_seqs": 5}, 64),
    ({"max_num_batched_tokens": 64, "max_num_seqs": 5}, 64),
    ({"max_num_batched_tokens": 64, "max_num_seqs": 5}, 3),
    ({**TIGHT, "num_blocks": 18}, 2),
])  # fmt: skip
async def test_prompt_logprobs_are_those_of_eager_logits(
    subject: Subject, settings: dict[str, int], max_prompt_rows: int, tmp_path: Path
) -> None:
    """Whatever the chunks and slices; told once, also by who was preempted; and nothing of it is taken from the cache."""
    prompts = [*subject.tiny.prompts, (5,)]
    async with in_process_cluster(subject.tiny.path, tmp_path, **settings) as cluster:
        cluster.worker.runner._max_prompt_rows = max_prompt_rows
        is_tight = "num_blocks" in settings
        num_preemptions = 0
        for _ in range(2):
            async with in_lockstep(cluster.worker.engine, len(prompts)) if is_tight else nullcontext():
                completions = await cluster.all_at_once(prompts, max_tokens=NUM_NEW, prompt_logprobs=2)
            for prompt, completion in zip(prompts, completions, strict=True):
                check_prompt_logprobs(completion, prompt, subject.loop.logits(prompt))
                assert completion.num_cached_tokens == 0
                subject.check(prompt, {}, completion)
            num_preemptions += sum(completion.num_preemptions for completion in completions)
        assert (num_preemptions > 0) == is_tight
        # What it has computed last is there for others; with one sequence at a time few windows are kept.
        after = await cluster.complete(prompts[-2], max_tokens=1)
        assert after.prompt_logprobs is None
        assert after.num_cached_tokens > 0 or is_tight


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


async def test_stop_ids_wait_for_min_tokens(subject: Subject, tmp_path: Path) -> None:
    """They are not drawn before, so the text is another one from there on; then they end it."""
    prompt = subject.tiny.prompts[0]
    free = subject.loop.text(prompt, {}, 32)
    stops: GenerateOptions = {"stop_token_ids": sorted(set(free[:3])), "max_tokens": 32}
    async with in_process_cluster(subject.tiny.path, tmp_path) as cluster:
        at_once = await cluster.complete(prompt, **stops)
        assert (list(at_once.token_ids), at_once.finish_reason) == ([], "stop")
        for min_tokens in (1, 4, 9):
            options: GenerateOptions = {**stops, "min_tokens": min_tokens}
            completion = await cluster.complete(prompt, **options)
            assert list(completion.token_ids) == subject.loop.text(prompt, options, 32)
            assert len(completion.token_ids) >= min_tokens


async def test_echo_begins_the_text_with_the_prompt(subject: Subject, tmp_path: Path) -> None:
    async with in_process_cluster(subject.tiny.path, tmp_path) as cluster:
        plain = await cluster.complete("hello, ", max_tokens=8)
        echoed = await cluster.complete("hello, ", max_tokens=8, echo=True)
        assert echoed.text == "hello, " + plain.text
        assert echoed.token_ids == plain.token_ids
        # A text that ends before its first token still begins with the prompt.
        ended = await cluster.complete("hello, ", stop_token_ids=plain.token_ids[:1], echo=True)
        assert (ended.text, ended.token_ids) == ("hello, ", ())

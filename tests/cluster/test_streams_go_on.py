"""Real workers that die, freeze or leave in the middle of streams: every reader gets the undisturbed text, once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvpool.client import Client, Completion, GenerateOptions, GenerateStream
from tests.cluster.cluster import MANAGER, TwoWorkers
from tests.load.judge import Delivered, problems
from tests.load.workload import Call, Reference, Request
from tests.model.sampling_oracle import uniform
from tests.tiny_models import MIN_MARGIN
from tests.until import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

LEASE_SECONDS = 1.0
NUM_TOKENS = 60
STEP_SECONDS = 0.03
NUM_TOKENS_BEFORE = 8
"""That each stream has delivered when something happens."""

TEMPERATURE = 0.8
GREEDY_FIRSTS = (14, 44, 55, 7)
DRAWN = ((200, 28), (202, 70), (201, 1), (203, 15))
"""First token of the prompt, and seed. Chosen so that no token of the answers is in doubt, as below."""
MIN_DRAWN_MARGIN = 5e-6
"""Between each number drawn and the next step of the distribution; computed in one go or token by token, that moves by 1e-6."""


class Subject(TwoWorkers):
    """A cluster of the workers a and b, and requests with their undisturbed answers."""

    workload: list[Reference]


def make_requests() -> list[Request]:
    """Unrelated prompts; half of the answers are drawn."""
    drawn = [(first, GenerateOptions(temperature=TEMPERATURE, seed=seed)) for first, seed in DRAWN]
    sampled = [*((first, GenerateOptions()) for first in GREEDY_FIRSTS), *drawn]
    return [
        Request(number, (first, *range(10)), NUM_TOKENS, options) for number, (first, options) in enumerate(sampled)
    ]


def check_beyond_doubt(model: PreTrainedModel, reference: Reference) -> None:
    """The undisturbed answer is transformers' own, and no rounding can turn one of its tokens into another."""
    request, answer = reference.request, reference.token_ids
    prompt = request.prompt
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    tokens = torch.tensor(answer)[:, None]
    if "seed" not in request.sampling:
        best = logits.topk(2, dim=-1)
        assert torch.equal(best.indices[:, :1], tokens)
        assert float((best.values[:, 0] - best.values[:, 1]).min()) >= MIN_MARGIN
        return
    seed = request.sampling["seed"] or 0
    cumulative = torch.softmax(logits.double() / TEMPERATURE, dim=-1).cumsum(dim=-1)
    numbers = [uniform(seed, len(prompt) + index) for index in range(len(answer))]
    drawn = torch.tensor(numbers, dtype=torch.float64)[:, None]
    assert torch.equal(torch.searchsorted(cumulative, drawn, right=True), tokens)
    assert float((cumulative - drawn).abs().min()) >= MIN_DRAWN_MARGIN


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    folder = tmp_path_factory.mktemp("moving")
    # The model's tokens are bytes at random, so most characters are incomplete: the text shows where a stream was joined wrongly.
    async with Subject(folder, lease_seconds=LEASE_SECONDS, tokenizer=True) as cluster:
        await cluster.start_both(num_blocks=8193, grace_seconds=0.1, step_seconds=STEP_SECONDS)
        async with cluster.client() as client:
            requests = make_requests()
            answers = await asyncio.gather(
                *(client.generate(request.prompt, **request.options("")).collect() for request in requests)
            )
        assert {answer.num_attempts for answer in answers} == {1}
        cluster.workload = [
            Reference(request, answer.token_ids, answer.text) for request, answer in zip(requests, answers, strict=True)
        ]
        oracle = AutoModelForCausalLM.from_pretrained(
            cluster.model.path, dtype=torch.float32, attn_implementation="eager"
        )
        for reference in cluster.workload:
            check_beyond_doubt(oracle.eval(), reference)
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: Subject) -> AsyncIterator[Subject]:
    """Both workers live, before every test and behind it; all blocks have come back and every law holds."""
    async with shared.lent():
        yield shared


class Reader:
    """Reads one stream to its end."""

    def __init__(self, client: Client, reference: Reference) -> None:
        request = reference.request
        self._call = Call(reference, request.max_tokens, request.options(""))
        self._stream: GenerateStream = client.generate(request.prompt, **self._call.options)
        self.delivered = Delivered()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> Completion:
        async for chunk in self._stream:
            self.delivered.add(chunk)
        return await self._stream.collect()

    async def has_begun(self) -> bool:
        """Whether it is in the middle. Its end would be too early."""
        assert not self._task.done(), self._task
        return len(self.delivered.tokens) >= NUM_TOKENS_BEFORE

    async def check(self) -> None:
        assert problems(self._call, self.delivered, await self._task, may_move=True) == []


@dataclass(frozen=True)
class Scene:
    """All streams, each in the middle."""

    readers: list[Reader]
    victim: str
    """A worker that tells some of them."""
    other: str

    @classmethod
    async def begin(cls, client: Client, cluster: Subject) -> Scene:
        readers = [Reader(client, reference) for reference in cluster.workload]
        for reader in readers:
            await eventually(reader.has_begun, "every stream has begun")
        (victim,) = readers[0].delivered.workers
        return cls(readers, victim, {"a": "b", "b": "a"}[victim])

    async def check(self) -> None:
        """Every stream comes to its end undisturbed."""
        async with asyncio.timeout(60):
            await asyncio.gather(*(reader.check() for reader in self.readers))

    async def has_moved(self) -> bool:
        """Whether a stream of the victim goes on at the other."""
        return any(reader.delivered.workers == [self.victim, self.other] for reader in self.readers)

    async def check_moved(self) -> None:
        """The same, and the victim's streams have moved to the other."""
        await self.check()
        assert await self.has_moved(), [reader.delivered.workers for reader in self.readers]


async def test_streams_of_a_worker_that_is_told_to_stop_go_on_at_the_other(cluster: Subject) -> None:
    """kill -9 is part of what is done to two workers below; a drain is, with every other fault, in test_live_faults.py."""
    async with cluster.client() as client:
        scene = await Scene.begin(client, cluster)
        cluster.processes[scene.victim].send(signal.SIGTERM)
        await scene.check_moved()


async def test_a_frozen_worker_that_thaws_while_its_streams_go_on_disturbs_nobody(cluster: Subject) -> None:
    """It still generates what it had begun, under attempts that are fenced, until it hears that its session has ended."""
    async with cluster.client(liveness_interval=0.5) as client:
        scene = await Scene.begin(client, cluster)
        cluster.suspend(scene.victim)
        await eventually(scene.has_moved, "a stream has moved", 30.0)
        cluster.resume(scene.victim)
        await scene.check_moved()


async def test_streams_move_on_when_their_second_worker_goes_too(cluster: Subject) -> None:
    async with cluster.client(liveness_interval=0.5, worker_wait=60.0) as client:
        scene = await Scene.begin(client, cluster)
        cluster.kill(scene.victim)
        await eventually(scene.has_moved, "a stream has moved", 30.0)
        cluster.suspend(scene.other)
        cluster.start_worker(scene.victim)
        await scene.check()
    assert any(reader.delivered.workers == [scene.victim, scene.other, scene.victim] for reader in scene.readers)


async def test_streams_survive_a_manager_that_is_killed(cluster: Subject) -> None:
    async with cluster.client() as client:
        scene = await Scene.begin(client, cluster)
        cluster.kill(MANAGER)
        await cluster.start_manager()
        await scene.check()


PROMPT = (77, *range(10))
ANSWERS = GenerateOptions(n=4, temperature=TEMPERATURE, seed=2**64 - 2, max_tokens=NUM_TOKENS)
BEAMS = GenerateOptions(n=3, num_beams=4, max_tokens=5 * NUM_TOKENS)
"""So long that a search still runs when a test that was not scheduled for a while has seen that it does."""
NUM_HELD_BY_BEAMS = 20
"""Blocks. The prompt has three; four beams, had they nothing in common, would have a hundred for each hundred tokens."""


async def test_each_of_several_answers_goes_on_when_their_worker_is_killed(cluster: Subject) -> None:
    async with cluster.client(liveness_interval=0.5) as client:
        expected = await client.generate(PROMPT, **ANSWERS).collect_all()
        options = [
            GenerateOptions(**{**ANSWERS, "n": 1, "seed": ((ANSWERS["seed"] or 0) + index) % 2**64})
            for index in range(len(expected))
        ]
        singles = await asyncio.gather(*(client.generate(PROMPT, **one).collect() for one in options))
        assert [(one.token_ids, one.text) for one in singles] == [(one.token_ids, one.text) for one in expected]
        stream = client.generate(PROMPT, **ANSWERS)
        counts = [0] * len(expected)
        victim = ""
        async for chunk in stream:
            assert chunk.start_index == counts[chunk.index]
            counts[chunk.index] += len(chunk.token_ids)
            if not victim and min(counts) >= NUM_TOKENS_BEFORE:
                victim = chunk.worker_id
                cluster.kill(victim)
        found = await stream.collect_all()
    assert [(one.token_ids, one.text) for one in found] == [(one.token_ids, one.text) for one in expected]
    assert all(one.worker_id != victim and one.num_attempts > 1 for one in found)
    assert {one.num_prompt_tokens for one in found} == {len(PROMPT)}


async def test_a_beam_search_begins_again_when_its_worker_is_killed(cluster: Subject) -> None:
    async with cluster.client(liveness_interval=0.5) as client:
        expected = await client.generate(PROMPT, **BEAMS).collect_all()
        stream = client.generate(PROMPT, **BEAMS)
        begun = await stream.next_chunk()
        assert begun is not None
        assert not begun.token_ids

        async def searches() -> bool:
            (counts,) = (await cluster.worker(begun.worker_id)).counts
            return counts.held >= NUM_HELD_BY_BEAMS

        await eventually(searches, "its beams have blocks")
        cluster.kill(begun.worker_id)
        found = await stream.collect_all()
    assert [(one.token_ids, one.text) for one in found] == [(one.token_ids, one.text) for one in expected]
    assert [one.score for one in found] == [one.score for one in expected]
    assert {one.num_attempts for one in found} == {2}

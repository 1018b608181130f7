"""The proof of `make live` in small, and that it can fail."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvpool.client import Completion, FinishReason
from kvpool.worker_service.engine.sampling_params import SamplingParams
from kvpool.worker_service.engine.step import SampledToken
from kvpool.worker_service.model.sampling.draw import Draw
from kvpool.worker_service.model.sampling.sampler import sample
from tests.cluster.cluster import MANAGER, Cluster
from tests.cluster.models import make_endless_model
from tests.live.difference import TIE, Judge, draw_distance
from tests.live.load import Ended
from tests.live.proof import Phase, Result, Settings, judge_streams, prove
from tests.live.workload import TEMPERATURE, TINY, TOP_P, Request, Workload
from tests.tiny_models import build_model

SETTINGS = Settings(
    model=TINY,
    kills=3,
    worker_faults=5,
    outage_seconds=0.0,
    reserve_seconds=15.0,
    workers=2,
    streams=4,
    requests=4,
    seed=2,
    lease_seconds=2.0,
    keep_alive_seconds=0.2,
    num_new=500,
    pause_seconds=0.3,
)
NUM_NEW = 300


@pytest.mark.slow
async def test_no_text_is_disturbed_whatever_happens_to_manager_and_workers(tmp_path: Path) -> None:
    """Three kills of the manager and each fault of a worker once, under load."""
    result = await prove(SETTINGS, tmp_path, lambda what, done, of: None)
    assert result.violations == []
    assert [phase.faults for phase in result.phases] == [3, 5]
    for phase in result.phases:
        assert phase.hit > 0
        assert phase.streams >= SETTINGS.streams
    assert set(result.worker_faults.values()) == {1}


@pytest.mark.slow
async def test_a_manager_that_dies_costs_no_token_to_be_computed_again(tmp_path: Path) -> None:
    """Streams outlive three managers; what they leave in the cache, and what was there before, is served by the third. The
    worker has forwarded every token once: Σ(prompt − cached + generated − 1)."""
    model = make_endless_model(tmp_path / "endless")
    prompts = [[200 + index, *range(20)] for index in range(4)]
    async with Cluster(tmp_path, lease_seconds=2.0, keep_alive_seconds=0.2) as cluster:
        await cluster.start_manager()
        # A reserve for longer than a manager takes to start, however busy the machine is.
        cluster.start_worker("a", model=model.path, block_size=4, num_blocks=8193, reserve_seconds=60)
        await cluster.until_registered("a")
        alone = [await cluster.complete(prompt, max_tokens=NUM_NEW, tenant_salt="alone") for prompt in prompts]
        async with cluster.client() as client:
            streams = [client.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True) for prompt in prompts]
            for stream in streams:
                while not (await anext(stream)).token_ids:
                    pass
            for _ in range(2):
                cluster.kill(MANAGER)
                await cluster.start_manager()
                await cluster.until_registered("a")
            disturbed = [await stream.collect() for stream in streams]
        again = [await cluster.complete(prompt, max_tokens=5) for prompt in prompts]
        await cluster.until_clean()
        worker = cluster.processes["a"]
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0
    for undisturbed, outlived, later in zip(alone, disturbed, again, strict=True):
        assert outlived.token_ids == undisturbed.token_ids
        assert (outlived.num_attempts, outlived.num_preemptions) == (1, 0)
        assert later.token_ids == undisturbed.token_ids[:5]
        assert later.num_cached_tokens == 20
    expected = sum(num_forwarded(answer) for answer in (*alone, *disturbed, *again))
    assert f" forwarded_tokens={expected} " in worker.log


def num_forwarded(answer: Completion) -> int:
    """Tokens that had to be computed for an answer, if each was computed once."""
    return answer.num_prompt_tokens - answer.num_cached_tokens + len(answer.token_ids) - 1


# -- the judge

PROMPT = (200, 3, 5, 7)
GREEDY = Request(0, PROMPT, 12, None)
DRAWN = Request(1, PROMPT, 12, 77)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_model("llama", 0)


def answer(model: PreTrainedModel, request: Request) -> list[int]:
    """What a worker's sampler makes of the model's logits, token by token."""
    sampling = SamplingParams()
    if request.seed is not None:
        sampling = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=request.seed)
    tokens = list(request.prompt)
    for position in range(len(tokens), len(tokens) + request.num_new):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1:]
        (sampled,) = sample(logits, [Draw(sampling, position)])
        assert isinstance(sampled, SampledToken)
        tokens.append(sampled.token_id)
    return tokens[len(request.prompt) :]


@pytest.mark.parametrize("request_", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_judge_finds_nothing_in_the_right_answer_and_every_wrong_token(
    model: PreTrainedModel, request_: Request
) -> None:
    tokens = answer(model, request_)
    assert Judge(model).doubts(request_, tokens) == []
    for index, token in enumerate(tokens):
        wrong = [*tokens[:index], (token + 1) % 264]
        (doubt,) = Judge(model).doubts(request_, wrong)
        assert doubt.index == index
        assert not doubt.is_tie


def test_of_two_logits_that_are_almost_equal_either_is_right() -> None:
    """One token's row of the output layer almost equals that of the best token: a tie; a little farther off: none."""
    best = answer(build_model("llama", 0), GREEDY)[0]
    for scale, is_tie in ((1e-6, True), (1e-2, False)):
        model = build_model("llama", 0)
        with torch.no_grad():
            row = model.lm_head.weight[best] * (1 - scale)
            model.lm_head.weight[7] = row
        (doubt,) = Judge(model).doubts(GREEDY, [7])
        assert doubt.is_tie is is_tie


# Of the weights 8, 4, 2, 1, 1 the first three sum to 14/16, so top_p 0.9 keeps four, or with the last two equal the lower id.
LOGITS = torch.log(torch.tensor([1.0, 8.0, 4.0, 2.0, 1.0], dtype=torch.float64)) * TEMPERATURE
EDGES = [1 / 15, 9 / 15, 13 / 15, 1.0]


@pytest.mark.parametrize(
    ("token", "number", "distance"),
    [
        (0, 0.0, 0.0),
        (1, 0.3, 0.0),
        (3, 0.99, 0.0),
        (1, EDGES[1] + 5e-5, 5e-5),
        (2, EDGES[1] - 5e-5, 5e-5),
        (0, 0.5, 0.5 - EDGES[0]),
        (4, 0.99, 0.1 - 1 / 16),
    ],
)
def test_a_draw_is_as_far_off_as_the_number_from_the_interval_or_the_sum_from_the_cut(
    token: int, number: float, distance: float
) -> None:
    assert draw_distance(LOGITS, token, number) == pytest.approx(distance, abs=1e-9)


def test_a_token_at_the_very_cut_is_a_tie() -> None:
    """The first sums to top_p but for less than TIE: the second may be kept or not."""
    off = TIE / 2
    for first in (TOP_P - off, TOP_P + off):
        logits = torch.log(torch.tensor([first, 1 - first], dtype=torch.float64)) * TEMPERATURE
        assert draw_distance(logits, 1, 0.95) <= TIE
        assert draw_distance(logits, 0, 0.95) <= TIE


def test_streams_that_broke_or_differ_or_moved_without_need_are_violations(model: PreTrainedModel) -> None:
    tokens = answer(model, GREEDY)
    completion = Completion("", tuple(tokens), FinishReason.LENGTH, 4, 0, "a", 1.0, None, 0, 1)
    workload = Workload([GREEDY], [completion])

    def judged(phase: str, **fields: object) -> list[str]:
        usual = {"request": 0, "token_ids": tuple(tokens), "workers": ("a",), "problem": None, "is_equal": True}
        result = Result(SETTINGS, phases=[Phase(phase)])
        judge_streams(result, Judge(model), workload, [[Ended(**{**usual, **fields})]])  # type: ignore[arg-type]
        return result.violations

    assert judged("manager killed") == []
    assert len(judged("manager killed", workers=("a", "b"))) == 1
    assert judged("worker harmed", workers=("a", "b")) == []
    assert len(judged("worker harmed", problem="Unavailable: gone")) == 1
    assert len(judged("worker harmed", token_ids=(*tokens[:-1], tokens[-1] ^ 1), is_equal=False)) == 1

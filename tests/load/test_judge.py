"""The judges of streams and of reference answers find what is wrong, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvpool.client import Chunk, Completion, DeadlineExceeded, FinishReason, GenerateOptions, Unavailable
from kvpool.worker_service.step import SamplingParams
from tests.live.proof import Result, Settings, judge_answers
from tests.live.workload import TINY
from tests.load.judge import Delivered, problems
from tests.load.workload import Call, Reference, Request
from tests.model.plain_loop import NOISE, PlainLoop, near_choices
from tests.model.sampling_oracle import Row, uniform
from tests.tiny_models import build_model

REFERENCE = Reference(Request(0, (9, 9, 9), 4, {}), (1, 2, 3, 4), "abcd")
DONE: dict[str, Any] = {
    "text": "abcd",
    "token_ids": REFERENCE.token_ids,
    "finish_reason": FinishReason.LENGTH,
    "num_prompt_tokens": 3,
    "num_cached_tokens": 0,
    "num_generated_tokens": 4,
    "worker_id": "a",
    "time_to_first_token_ms": 1.0,
    "logprobs": None,
    "num_preemptions": 0,
    "num_attempts": 1,
}


def chunk(start: int, tokens: Sequence[int], text: str = "", worker: str = "a") -> Chunk:
    return Chunk(start, tuple(tokens), text, None, None, None, worker, 1, None)


LATE = DeadlineExceeded("late")


@pytest.mark.parametrize(
    ("chunks", "end", "options", "words"),
    [
        ([chunk(0, [1, 2], "ab"), chunk(2, [3, 4], "cd")], {}, {}, ""),
        ([chunk(0, [1, 2], "ab"), chunk(3, [3, 4], "cd")], {}, {}, "a chunk for token 3 after 2 tokens"),
        ([chunk(0, [1, 2], "ab"), chunk(2, [3, 4], "cd", "b")], {}, {}, "moved without need"),
        ([chunk(0, [1, 2, 3, 5], "abcd")], {"token_ids": (1, 2, 3, 5)}, {}, "token 3 is 5, not 4"),
        ([chunk(0, [1, 2, 3], "abc")], {"text": "abc", "token_ids": (1, 2, 3)}, {}, "3 tokens instead of 4"),
        ([chunk(0, [1, 2, 3, 4, 5], "abcd")], {"token_ids": (1, 2, 3, 4, 5)}, {}, "5 tokens instead of 4"),
        ([chunk(0, [1, 2, 3, 4], "abc")], {}, {}, "the whole answer is not the sum of its chunks"),
        ([chunk(0, [1, 2, 3, 4], "abce")], {"text": "abce"}, {}, "the right tokens, but another text"),
        ([chunk(0, [1, 2, 3, 4], "abcd")], {"finish_reason": FinishReason.STOP}, {}, "finish reason stop, not length"),
        ([chunk(0, [1, 2, 3, 4], "abcd")], {"num_prompt_tokens": 4}, {}, "4 prompt tokens, not 3"),
        ([chunk(0, [1, 2], "ab")], None, {}, ""),
        ([chunk(0, [1, 3], "ab")], None, {}, "token 1 is 3, not 2"),
        ([chunk(0, [1, 2], "ab")], Unavailable("gone"), {}, "Unavailable: gone"),
        ([chunk(0, [1, 2], "ab")], LATE, {"timeout": 1.0}, ""),
        ([chunk(0, [1, 2], "ab")], LATE, {}, "DeadlineExceeded: late"),
    ],
)
def test_each_way_to_be_wrong_is_found(chunks: list[Chunk], end: Any, options: GenerateOptions, words: str) -> None:
    delivered = Delivered()
    for one in chunks:
        delivered.add(one)
    ended = Completion(**{**DONE, **end}) if isinstance(end, dict) else end
    found = problems(Call(REFERENCE, 4, options), delivered, ended, may_move=False)
    assert found == ([words] if words else [])
    if delivered.has_moved:
        assert problems(Call(REFERENCE, 4, options), delivered, ended, may_move=True) == []


# -- reference answers

PROMPT = (200, 3, 5, 7)
GREEDY = Request(0, PROMPT, 12, {})
DRAWN = Request(1, PROMPT, 12, {"temperature": 0.8, "top_p": 0.9, "seed": 77})


@pytest.mark.parametrize("request_", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_nothing_is_found_in_the_right_answer_and_every_wrong_token_is(request_: Request) -> None:
    loop = PlainLoop(build_model("llama", 0))
    tokens = loop.text(PROMPT, request_.sampling, request_.max_tokens)
    settings = Settings(TINY, 0, 0, 0.0, 15.0, 2, 1, 1, 1)

    def judged(answer: Sequence[int]) -> Result:
        result = Result(settings)
        judge_answers(result, loop, [Reference(request_, tuple(answer))])
        assert result.ties == []
        return result

    assert judged(tokens).violations == []
    for index, token in enumerate(tokens):
        wrong = (token + 1) % 264
        result = judged([*tokens[:index], wrong, *tokens[index + 1 :]])
        assert result.violations == [f"undisturbed: request {request_.number}, token {index} is {wrong}"]


def margins() -> Iterator[tuple[str, list[float], Row]]:
    """Decisions between tokens 0 and 1 of which the logits favour 0, by a hundredth of NOISE and by a hundred times NOISE."""
    for scale, kind in ((0.01, "tie"), (100.0, "clear")):
        off = scale * NOISE
        yield kind, [5.0 + off, 5.0, 0.0], Row()
        drawn = SamplingParams(temperature=1.0, seed=3)
        number = uniform(drawn.seed, 0)
        yield kind, [math.log(number + off), math.log(1 - number - off)], Row(drawn)
        seed = next(seed for seed in range(1_000) if uniform(seed, 0) > 0.95)
        cut = SamplingParams(temperature=1.0, top_p=0.9, seed=seed)
        yield kind, [math.log(0.9 + off / 10), math.log(0.1 - off / 10)], Row(cut)


@pytest.mark.parametrize(("kind", "logits", "row"), list(margins()))
def test_where_rounding_may_decide_either_token_is_right(kind: str, logits: list[float], row: Row) -> None:
    """Two best logits, a draw at the edge of its interval, a token at the cut of top_p."""
    assert near_choices(logits, row, 64) == ({0, 1} if kind == "tie" else {0})


@pytest.mark.parametrize(("scale", "is_tie"), [(1e-6, True), (1e-2, False)])
def test_an_answer_with_an_almost_equal_token_is_a_tie(scale: float, is_tie: bool) -> None:
    """One token's row of the output layer almost equals that of the best token."""
    model = build_model("llama", 0)
    (best,) = PlainLoop(model).text(PROMPT, {}, 1)
    model.lm_head.weight.data[7] = model.lm_head.weight.data[best] * (1 - scale)
    assert list(PlainLoop(model).differences(PROMPT, {}, [7])) == [(0, is_tie)]

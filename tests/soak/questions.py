"""What is asked in a soak, and the one right answer to it: the plain loop over eager logits, computed before anything is served."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpool.client import GenerateOptions
from tests.model.plain_loop import PlainLoop, ProvesNothing

TOKENS: Final = range(256)
MAX_PROMPT: Final = 160
NUM_FAMILIES: Final = 4


@dataclass(frozen=True)
class Question:
    """A prompt, how it is to be continued, and the tokens that must come, of which fewer may be asked for."""

    prompt: tuple[int, ...]
    sampling: GenerateOptions
    tokens: tuple[int, ...]


def _sampling(draw: random.Random) -> GenerateOptions:
    """Greedy, or drawn with a random set of the options."""
    options: GenerateOptions = {}
    if draw.random() < 0.4:
        options["repetition_penalty"] = draw.uniform(0.8, 1.6)
    if draw.random() < 0.3:
        options["presence_penalty"] = draw.uniform(-0.5, 1.5)
    if draw.random() < 0.3:
        options["frequency_penalty"] = draw.uniform(-0.2, 0.8)
    if draw.random() < 0.3:
        options["logit_bias"] = {draw.choice(TOKENS): draw.uniform(-20.0, 4.0) for _ in range(3)}
    if draw.random() < 0.25:
        return options
    options |= GenerateOptions(temperature=draw.uniform(0.3, 1.8), seed=draw.getrandbits(64))
    if draw.random() < 0.5:
        options["top_k"] = draw.randint(2, 60)
    if draw.random() < 0.5:
        options["top_p"] = draw.uniform(0.5, 0.98)
    if draw.random() < 0.3:
        options["min_p"] = draw.uniform(0.0, 0.2)
    return options


def make_questions(
    loop: PlainLoop, count: int, num_tokens: int, draw: random.Random, on_made: Callable[[int], None]
) -> list[Question]:
    """So many, with `num_tokens` tokens each; three of four begin like others. Those whose answer hangs on rounding are drawn
    anew."""
    families = [draw.choices(TOKENS, k=draw.randint(16, MAX_PROMPT - 24)) for _ in range(NUM_FAMILIES - 1)]
    questions: list[Question] = []
    while len(questions) < count:
        beginning = ([], *families)[len(questions) % NUM_FAMILIES]
        longest = 24 if beginning else MAX_PROMPT
        length = min(longest, max(1, round(draw.lognormvariate(2.5, 1.0))))
        prompt = (*beginning, *draw.choices(TOKENS, k=length))
        sampling = _sampling(draw)
        try:
            tokens = loop.text(prompt, sampling, num_tokens)
        except ProvesNothing:
            continue
        questions.append(Question(prompt, sampling, tuple(tokens)))
        on_made(len(questions))
    return questions

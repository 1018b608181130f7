"""What is asked in a soak, how it is read, and the right answers: a plain loop over eager logits, before anything is served."""

from __future__ import annotations

import random
from typing import Final

from kvpool.client import GenerateOptions
from tests.load.workload import Call, Reference, Request, make_prompts
from tests.model.plain_loop import PlainLoop, ProvesNothing
from tests.telling import Tell

TOKENS: Final = range(256)
MAX_PROMPT: Final = 160
CANCELS: Final = 0.2
EXPIRES: Final = 0.05
ALONE: Final = 0.3
"""Shares of the streams that their reader leaves early, that have too little time, and that share no blocks with others."""


def make_workload(loop: PlainLoop, count: int, num_tokens: int, draw: random.Random, progress: Tell) -> list[Reference]:
    """`count` requests with `num_tokens` tokens each; three of four begin like others. A request whose answer hangs on
    rounding is replaced."""
    families = [draw.randint(16, MAX_PROMPT - 24) for _ in range(3)]
    prompts = make_prompts(TOKENS, families, lambda: max(1, round(draw.lognormvariate(2.5, 1.0))), MAX_PROMPT, draw)
    workload: list[Reference] = []
    while len(workload) < count:
        request = Request(len(workload), next(prompts), num_tokens, _sampling(draw))
        try:
            tokens = loop.text(request.prompt, request.sampling, num_tokens)
        except ProvesNothing:
            continue
        workload.append(Reference(request, tuple(tokens)))
        progress("right answers", len(workload), count)
    return workload


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


def make_call(reference: Reference, number: int, draw: random.Random) -> Call:
    """Log-normal lengths, three priorities and tenants; some readers leave early, some streams run out of time."""
    wanted = min(reference.request.max_tokens, max(1, round(draw.lognormvariate(3.2, 0.8))))
    options = reference.request.options(f"alone {number}" if draw.random() < ALONE else "", wanted)
    options |= GenerateOptions(priority=draw.choice([-1, 0, 0, 1]), tenant=draw.choice(["", "a", "b"]))
    kind = draw.random()
    if CANCELS <= kind < CANCELS + EXPIRES:
        options["timeout"] = draw.uniform(0.01, 1.0)
    return Call(reference, wanted, options, draw.randint(0, wanted - 1) if kind < CANCELS else None)

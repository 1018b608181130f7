"""What is asked of the cluster, and what it must answer: the same request alone, on a worker that nothing happens to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpool.client import Client, Completion, GenerateOptions
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model
from tests.cluster.models import make_endless_model

TINY: Final = "tiny"
SMOLLM2: Final = "smollm2"
TEMPERATURE: Final = 0.8
TOP_P: Final = 0.9


@dataclass(frozen=True)
class Model:
    """A model that workers serve in fp32, and how long the requests to it are."""

    name: str
    path: Path
    tokens: range
    """Prompts are made of these."""
    num_new_min: int
    num_new_max: int
    block_size: int

    @classmethod
    def make(cls, name: str, folder: Path) -> Model:
        """TINY, made in the folder; or SMOLLM2, converted at the very first time."""
        if name == TINY:
            # One token per byte: most characters are incomplete, so the text shows where a stream was joined wrongly.
            path = make_endless_model(folder / TINY, tokenizer=True).path
            return cls(name, path, range(256), 800, 3_000, block_size=4)
        path = resolve_model("smollm2", default_cache_dir(), lambda line: None).path
        return cls(name, path, range(1_000, 40_000), 24, 64, block_size=16)


@dataclass(frozen=True)
class Request:
    """One prompt and how it is to be continued."""

    number: int
    prompt: tuple[int, ...]
    num_new: int
    seed: int | None
    """Of the draws; None: greedy."""

    def options(self, salt: str) -> GenerateOptions:
        """For `Client.generate`; requests with different salts share no blocks and say the same."""
        options = GenerateOptions(max_tokens=self.num_new, ignore_eos=True, tenant_salt=salt)
        if self.seed is not None:
            options |= GenerateOptions(temperature=TEMPERATURE, top_p=TOP_P, seed=self.seed)
        return options


def make_requests(model: Model, count: int, draw: random.Random, num_new: int | None = None) -> list[Request]:
    """Half greedy, half drawn; in each half three of four prompts begin like others. `num_new`: of each; None: at random."""
    families = [draw.choices(model.tokens, k=length) for length in (33, 64, 120)]
    requests: list[Request] = []
    for number in range(count):
        shared = ([], *families)[number // 2 % 4]
        prompt = (*shared, *draw.choices(model.tokens, k=draw.randint(4, 24)))
        length = num_new or draw.randint(model.num_new_min, model.num_new_max)
        requests.append(Request(number, prompt, length, draw.getrandbits(64) if number % 2 else None))
    return requests


@dataclass
class Workload:
    """Requests with their undisturbed answers."""

    requests: list[Request]
    answers: list[Completion] = field(default_factory=list)

    async def ask_undisturbed(self, client: Client, on_answer: Callable[[], None]) -> None:
        """Ask one after the other, each alone in the cluster and with nothing in the cache."""
        for request in self.requests:
            answer = await client.generate(request.prompt, **request.options(f"undisturbed {request.number}")).collect()
            assert len(answer.token_ids) == request.num_new
            assert (answer.num_attempts, answer.num_cached_tokens, answer.num_preemptions) == (1, 0, 0), answer
            self.answers.append(answer)
            on_answer()

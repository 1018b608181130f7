"""What is asked of the cluster, and what it must answer: the same request alone, on a worker that nothing happens to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.client import Client, GenerateOptions
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model
from tests.cluster.models import make_endless_model
from tests.load.workload import Call, Reference, Request, make_prompts

TINY: Final = "tiny"
WINDOWS: Final = "tiny-windows"
"""Every other layer has a sliding window."""
STATES: Final = "tiny-states"
"""Every other layer is recurrent."""
_ARCHITECTURES: Final = {TINY: "llama", WINDOWS: "gemma2", STATES: "lfm2"}
SMOLLM2: Final = "smollm2"


@dataclass(frozen=True)
class Model:
    """A model that workers serve in fp32, and how long the requests to it are."""

    path: Path
    tokens: range
    num_new_min: int
    num_new_max: int
    block_size: int

    @classmethod
    def make(cls, name: str, folder: Path) -> Model:
        """TINY, WINDOWS or STATES, made in the folder; or SMOLLM2, converted at the very first time."""
        if name in _ARCHITECTURES:
            # One token per byte: most characters are incomplete, so the text shows where a stream was joined wrongly.
            path = make_endless_model(folder / name, architecture=_ARCHITECTURES[name], tokenizer=True).path
            return cls(path, range(256), 800, 3_000, block_size=4)
        path = resolve_model("smollm2", default_cache_dir(), lambda line: None).path
        return cls(path, range(1_000, 40_000), 24, 64, block_size=16)


def make_requests(model: Model, count: int, draw: random.Random, num_new: int | None = None) -> list[Request]:
    """Half greedy, half drawn; in each half three of four prompts begin like others. `num_new`: of each; None: at random."""
    prompts = make_prompts(model.tokens, (33, 64, 120), lambda: draw.randint(4, 24), 144, draw)
    requests: list[Request] = []
    for number in range(count):
        length = num_new or draw.randint(model.num_new_min, model.num_new_max)
        drawn = GenerateOptions(temperature=0.8, top_p=0.9, seed=draw.getrandbits(64))
        requests.append(Request(number, next(prompts), length, drawn if number % 2 else {}))
    return requests


async def ask_undisturbed(
    client: Client, requests: Sequence[Request], on_answer: Callable[[int], None]
) -> list[Reference]:
    """The answers to requests one after the other, each alone in the cluster and with nothing in the cache."""
    workload: list[Reference] = []
    for request in requests:
        answer = await client.generate(request.prompt, **request.options(f"undisturbed {request.number}")).collect()
        assert len(answer.token_ids) == request.max_tokens
        assert (answer.num_attempts, answer.num_cached_tokens, answer.num_preemptions) == (1, 0, 0), answer
        workload.append(Reference(request, answer.token_ids, answer.text))
        on_answer(len(workload))
    return workload


def make_call(reference: Reference, number: int, draw: random.Random) -> Call:
    """Every other stream may be served from what others left in the cache, also from its own earlier life."""
    salt = f"alone {number}" if draw.random() < 0.5 else "shared"
    return Call(reference, reference.request.max_tokens, reference.request.options(salt))

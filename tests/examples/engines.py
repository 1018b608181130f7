"""What the tests of the examples of engines share: the truth, what a program says, and a service whose answers are lost."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np

from examples import own_engine
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cluster.cluster import Cluster
from tests.cluster.process import Process

Start = Callable[..., Process]
"""Starts an engine with a manager's address and, by name, its flags."""


class Text(NamedTuple):
    """What the program says of one prompt."""

    prompt: str
    text: str
    table: list[int]
    cached: list[int]


def texts_of(output: str) -> list[Text]:
    pattern = r"(.+) -> (.+), the same as without the cache\n  block table (.+), cached tokens in each round (.+)\n"
    return [Text(*map(ast.literal_eval, found)) for found in re.findall(pattern, output)]


async def assert_nothing_is_left(cluster: Cluster) -> None:
    """The engine has left, and every law of the manager holds."""
    assert await cluster.describe() == []
    assert list((await cluster.manager_stub.Check(pb.CheckRequest())).violations) == []


def dense(
    prompt: str, num_tokens: int, windows: Sequence[float] = (math.inf, math.inf)
) -> tuple[list[int], np.ndarray[Any, Any]]:
    """The tokens after a prompt and the logits of the last, position by position, with neither blocks nor cache. `windows`: tokens
    that each layer sees."""
    tokens = [ord(character) - 32 for character in prompt]
    logits = np.zeros(own_engine.VOCAB)
    for _ in range(num_tokens):
        hidden = [
            own_engine.EMBEDDING[token]
            + [np.sin(position / 50 ** (i / own_engine.DIM) + i) for i in range(own_engine.DIM)]
            for position, token in enumerate(tokens)
        ]
        for (query, key, value, output), window in zip(own_engine.WEIGHTS, windows, strict=True):
            keys = np.stack([x @ key for x in hidden])
            values = np.stack([x @ value for x in hidden])
            seen = []
            for position, x in enumerate(hidden):
                visible = slice(int(max(0, position - window + 1)), position + 1)
                weights = np.exp(keys[visible] @ (x @ query) / own_engine.DIM)
                seen.append(weights @ values[visible] / weights.sum() @ output)
            hidden = [x + attention for x, attention in zip(hidden, seen, strict=True)]
        logits = hidden[-1] @ own_engine.HEAD
        tokens.append(int(logits.argmax()))
    return tokens, logits


def as_text(tokens: list[int]) -> str:
    return "".join(chr(token + 32) for token in tokens)


class Unanswered:
    """A call whose answer is lost, as a broken connection loses it."""

    def __init__(self, sent: Any) -> None:
        self._sent = sent

    async def code(self) -> grpc.StatusCode:
        await self._sent
        return grpc.StatusCode.DEADLINE_EXCEEDED


class ForgetfulStub:
    """The real service, which executes every call; of three answers two are lost."""

    def __init__(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        self._stub = stub
        self.num_sent = 0

    def __getattr__(self, name: str) -> Any:
        def send(request: Any, timeout: float) -> Any:
            self.num_sent += 1
            sent = getattr(self._stub, name)(request, timeout=timeout)
            return sent if self.num_sent % 3 == 0 else Unanswered(sent)

        return send

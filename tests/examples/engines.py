"""The examples of engines, with the truth about their models, and a service whose answers are lost."""

from __future__ import annotations

import ast
import asyncio
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import grpc
import numpy as np

from examples import own_engine, own_engine_windows
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests.cluster.cluster import Cluster
from tests.cluster.process import Process

PROMPTS, SIZE = own_engine.PROMPTS, own_engine.SIZE
WINDOW = own_engine_windows.WINDOW
NUM_SHARED_BLOCKS = len(own_engine.STORY) // SIZE


class Text(NamedTuple):
    """What the program says of one prompt."""

    prompt: str
    text: str
    table: list[int]
    cached: list[int]


@dataclass(frozen=True)
class Example:
    """An example, how it is started, and the truth about its model."""

    program: Sequence[str]
    new_engine: Callable[..., Any]
    root: common_pb2.Root
    visible: Sequence[float]
    """Tokens that each layer sees."""

    @cached_property
    def truth(self) -> dict[str, Truth]:
        """For each prompt: 40 more tokens."""
        return {prompt: dense(prompt, 40, self.visible) for prompt in PROMPTS}

    def registration(self, worker_id: str, *pools: int) -> pb.RegisterRequest:
        """As the program registers; `pools`: the number of blocks of each group."""
        hello = pb.RegisterRequest(worker_id=worker_id, incarnation=1, register_no=1, address="127.0.0.1:1")
        hello.model_fingerprint = self.root.model_fingerprint
        config = hello.kv_cache_config
        config.block_size = SIZE
        config.groups.add(full_attention=common_pb2.FullAttentionSpec())
        if len(pools) > 1:
            window = common_pb2.SlidingWindowSpec(window_tokens=WINDOW, ring_blocks=own_engine_windows.RING)
            config.groups.add(group=1, sliding_window=window)
        for group, num_blocks in enumerate(pools):
            config.pools.add(group=group, tier=common_pb2.TIER_DEVICE, num_blocks=num_blocks)
        return hello

    async def registered(self, cluster: Cluster, stub: Any, *pools: int) -> Any:
        """The engine "here", in this process."""
        return self.new_engine(stub, await cluster.manager_stub.Register(self.registration("here", *pools)), *pools)

    def check_program(self, output: str) -> list[Text]:
        """Every text that the program has printed is what the model says without a cache."""
        pattern = r"(.+) -> (.+), the same as without the cache\n  block table (.+), cached tokens in each round (.+)\n"
        texts = [Text(*map(ast.literal_eval, found)) for found in re.findall(pattern, output)]
        expected = [(prompt, as_text(tokens[len(prompt) :])) for prompt, (tokens, _) in self.truth.items()]
        assert [(text.prompt, text.text) for text in texts] == expected, output
        return texts

    async def check_engine(self, cluster: Cluster, engine: Any) -> list[list[int]]:
        """Generate all texts at once, and look at logits and pools; returns the cached tokens of each round of each text."""
        texts = await asyncio.gather(*(engine.generate(prompt, 40) for prompt in PROMPTS))
        for prompt, (tokens, logits, _, _) in zip(PROMPTS, texts, strict=True):
            expected_tokens, expected_logits = self.truth[prompt]
            assert tokens.tolist() == expected_tokens
            np.testing.assert_allclose(logits, expected_logits, rtol=1e-9)
        full, *windows = (await cluster.worker("here")).counts
        assert full.free + full.cached == full.capacity
        assert full.cached > 0
        assert not engine.blocks.users.any()
        for counts in windows:
            assert counts.free + counts.cached + counts.reserved == counts.capacity
            assert np.flatnonzero(engine.windows.users).tolist() == sorted(engine.reserve), "a text holds a block"
        assert await cluster.audit() == []
        return [cached for _, _, _, cached in texts]


Start = Callable[..., Process]
"""Starts an example with a manager's address and, by name, its flags."""
Truth = tuple[list[int], np.ndarray[Any, Any]]
"""Tokens, and the logits of the last one."""


async def assert_nothing_is_left(cluster: Cluster) -> None:
    """The engine has left, and every law of the manager holds."""
    assert await cluster.describe() == []
    assert await cluster.audit() == []


def dense(prompt: str, num_tokens: int, visible: Sequence[float]) -> Truth:
    """Continue a prompt position by position, with neither blocks nor cache. `visible`: tokens that each layer sees."""
    tokens = [ord(character) - 32 for character in prompt]
    logits = np.zeros(own_engine.VOCAB)
    for _ in range(num_tokens):
        hidden = [
            own_engine.EMBEDDING[token]
            + [np.sin(position / 50 ** (i / own_engine.DIM) + i) for i in range(own_engine.DIM)]
            for position, token in enumerate(tokens)
        ]
        for (query, key, value, output), window in zip(own_engine.WEIGHTS, visible, strict=True):
            keys = np.stack([x @ key for x in hidden])
            values = np.stack([x @ value for x in hidden])
            seen = []
            for position, x in enumerate(hidden):
                part = slice(int(max(0, position - window + 1)), position + 1)
                weights = np.exp(keys[part] @ (x @ query) / own_engine.DIM)
                seen.append(weights @ values[part] / weights.sum() @ output)
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


PLAIN = Example([own_engine.__file__], own_engine.Engine, own_engine.ROOT, (math.inf, math.inf))
WINDOWS = Example(
    ["-m", "examples.own_engine_windows"], own_engine_windows.Engine, own_engine_windows.ROOT, (math.inf, WINDOW)
)

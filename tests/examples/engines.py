"""What the tests of the examples of engines share: what a program says, and a service whose answers are lost."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

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

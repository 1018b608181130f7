"""Single messages with which a stranger tries to harm a worker, and what each is answered: one table, as `at_manager.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import grpc

from kvpool.v1 import worker_pb2
from kvpool.worker_service.servicer import SERVICE
from tests.attacks.at_manager import NO_MESSAGE

PATHS: Final = tuple(
    f"/{SERVICE}/{method.name}" for method in worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods
)


class Attack(NamedTuple):
    """A message. Methods that stream are asked as if they did not: they refuse before they answer anything."""

    name: str
    path: str
    payload: Callable[[], bytes]
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    words: tuple[str, ...] = ()
    """Which the refusal has."""

    def __str__(self) -> str:
        return self.name


def _long_text() -> bytes:
    """15 MB, which the transport takes and no model does."""
    request = worker_pb2.GenerateRequest(sequence_id="long", attempt=1, text="hello world " * 1_300_000)
    request.stop.max_tokens = 1
    return request.SerializeToString()


ALL: Final = (
    *(
        Attack(f"no message {number} at {path}", path, partial(bytes, payload))
        for path in PATHS
        for number, payload in enumerate(NO_MESSAGE, 1)
    ),
    Attack("15 MB of text", f"/{SERVICE}/Generate", _long_text, words=("156000", "--max-model-len")),
)

"""What is on its way between the workers and the manager: whole unary calls and their answers, in any order."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from google.protobuf.message import Message

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.refusal import Refusal
from tests import manager_calls
from tests.service_messages import REQUESTS, RESPONSES


class Letter(NamedTuple):
    """A request on its way up or, with `is_reply`, its answer on its way down."""

    method: str
    worker: int
    call: int
    """Which call of the worker it belongs to, counted over its whole life: a worker hears only the one it waits for."""
    payload: bytes
    is_reply: bool = False
    refusal: str = ""
    """Of a reply that is a failure: the reason. Then there is no payload."""


def request_of(letter: Letter) -> Any:
    return REQUESTS[letter.method].FromString(letter.payload)


def response_of(letter: Letter) -> Any:
    return RESPONSES[letter.method].FromString(letter.payload)


def execute(manager: CacheManager, letter: Letter, now: float) -> Letter:
    """Let the manager execute a request, as its servicer does; returns the answer."""
    try:
        response = manager_calls.execute(manager, letter.method, request_of(letter), now)
    except Refusal as refusal:
        return letter._replace(payload=b"", is_reply=True, refusal=refusal.reason.value)
    return letter._replace(payload=response.SerializeToString(deterministic=True), is_reply=True)


class Form(NamedTuple):
    """A message with its absolute numbers taken out: two forms are equal if the messages differ in nothing else."""

    template: bytes
    sessions: tuple[int, ...]
    calls: tuple[int, ...]
    entries: tuple[int, ...]
    """Numbers of downlink entries: acknowledged, or told."""
    stamps: tuple[int, ...]
    """Generations."""
    registers: tuple[int, ...]
    incarnations: tuple[int, ...]


_PLACE = {
    "session": 0,
    "call_no": 1,
    "downlink_ack": 2,
    "number": 2,
    "generations": 3,
    "register_no": 4,
    "incarnation": 5,
    "epoch": 6,
    "highest_epoch_seen": 6,
}


@functools.lru_cache(maxsize=1 << 16)
def form_of(method: str, payload: bytes, is_reply: bool) -> Form:
    message = (RESPONSES if is_reply else REQUESTS)[method].FromString(payload)
    numbers: tuple[list[int], ...] = tuple([] for _ in range(7))
    _take_out(message, numbers)
    return Form(message.SerializeToString(deterministic=True), *map(tuple, numbers[:6]))


def _take_out(message: Message, numbers: tuple[list[int], ...]) -> None:
    for field, value in message.ListFields():
        place = _PLACE.get(field.name)
        if place is not None:
            if field.name == "generations":
                numbers[place].extend(value)
                value[:] = [0] * len(value)
            else:
                numbers[place].append(value)
                setattr(message, field.name, 1)
        elif field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                _take_out(part, numbers)

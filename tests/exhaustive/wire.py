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


_KINDS = {
    "session": "sessions",
    "call_no": "calls",
    "downlink_ack": "entries",
    "number": "entries",
    "generations": "stamps",
    "register_no": "registers",
    "incarnation": "incarnations",
    "epoch": "epochs",
    "highest_epoch_seen": "epochs",
}
"""Of the absolute numbers, by the name of their field. Entries are those of the downlink that are acknowledged, or told."""


class MessageForm(NamedTuple):
    """A message with its absolute numbers taken out: two forms are equal if the messages differ in nothing else."""

    template: bytes
    numbers: dict[str, list[int]]
    """By kind."""


@functools.lru_cache(maxsize=1 << 16)
def form_of(method: str, payload: bytes, is_reply: bool) -> MessageForm:
    message = (RESPONSES if is_reply else REQUESTS)[method].FromString(payload)
    numbers: dict[str, list[int]] = {kind: [] for kind in _KINDS.values()}
    _take_out(message, numbers)
    return MessageForm(message.SerializeToString(deterministic=True), numbers)


def _take_out(message: Message, numbers: dict[str, list[int]]) -> None:
    for field, value in message.ListFields():
        kind = _KINDS.get(field.name)
        if kind == "stamps":
            numbers[kind].extend(value)
            value[:] = [0] * len(value)
        elif kind is not None:
            numbers[kind].append(value)
            setattr(message, field.name, 1)
        elif field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                _take_out(part, numbers)

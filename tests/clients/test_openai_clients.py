"""Clients of OpenAI's API before kvpool, each in its own environment: `drivers/` use them as their users do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from tests.clients import driving
from tests.clients.served import Served, messages_about, text_about
from tests.clients.table import CLIENTS, Client, chosen

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


class Seen(NamedTuple):
    """What a client saw."""

    client: Client
    seen: dict[str, Any]


@pytest.fixture(scope="module")
def known() -> dict[str, Seen]:
    """By name: each driver runs once."""
    return {}


@pytest_asyncio.fixture(loop_scope="session")
async def seen(request: pytest.FixtureRequest, served: Served, known: dict[str, Seen]) -> Seen:
    name = request.param
    if name not in known:
        known[name] = Seen(CLIENTS[name], await driving.drive(name, served, CLIENTS[name].subject))
    return known[name]


async def chats_are_kvpools_own(served: Served, seen: Seen) -> None:
    """Whole, streamed, and by asynchronous functions where there are any."""
    own = await served.own_chat(messages_about(seen.client.subject))
    driving.assert_are_kvpools_own(own, seen.seen["chats"])


async def texts_are_kvpools_own(served: Served, seen: Seen) -> None:
    """Whole and streamed."""
    own = await served.own_text(text_about(seen.client.subject))
    if seen.client.text_usage:
        driving.assert_are_kvpools_own(own, seen.seen["texts"])
    else:
        assert seen.seen["texts"] == [own.text, own.text]


async def refusals_are_its_own_exception_with_our_words(served: Served, seen: Seen) -> None:
    """What kvpool cannot do."""
    client, refusals = seen.client, seen.seen["refused"]
    assert refusals.keys() == client.refused.keys()
    for asked, param in client.refused.items():
        refused = refusals[asked]
        assert (refused["exception"], refused["status"]) == (client.exception, 400), asked
        assert driving.refusal(param) in refused["message"], asked
        if client.passes_param_on:
            assert refused["param"] == param, asked


def claims_of(client: Client) -> list[Callable[[Served, Seen], Awaitable[None]]]:
    """What is claimed of it."""
    return [
        *([chats_are_kvpools_own] if client.chats else []),
        *([texts_are_kvpools_own] if client.texts else []),
        refusals_are_its_own_exception_with_our_words,
    ]


@pytest.mark.parametrize(
    ("seen", "claim"),
    [
        pytest.param(name, claim, id=f"{name}-{claim.__name__}")
        for name in chosen(CLIENTS)
        for claim in claims_of(CLIENTS[name])
    ],
    indirect=["seen"],
)
async def test_a_client(claim: Callable[[Served, Seen], Awaitable[None]], served: Served, seen: Seen) -> None:
    await claim(served, seen)

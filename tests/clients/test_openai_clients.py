"""Clients of OpenAI's API before kvpool, each in its own environment: `drivers/` use them as their users do."""

from __future__ import annotations

from typing import Any, Final

import pytest
import pytest_asyncio

from tests.clients import driving
from tests.clients.served import Served, messages_about, text_about
from tests.clients.table import CLIENTS, Client, chosen

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

NAMES: Final = chosen(CLIENTS)
TEXTS: Final = [name for name in NAMES if CLIENTS[name].texts]


class Seen:
    """What a client saw."""

    def __init__(self, client: Client, seen: dict[str, Any]) -> None:
        self.client = client
        self.chats: list[Any] = seen.get("chats", [])
        self.texts: list[Any] = seen.get("texts", [])
        self.refused: dict[str, Any] = seen["refused"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seen(request: pytest.FixtureRequest, served: Served) -> Seen:
    client = CLIENTS[request.param]
    return Seen(client, await driving.drive(request.param, served, client.subject))


@pytest.mark.parametrize("seen", [name for name in NAMES if CLIENTS[name].chats], indirect=True)
async def test_chats_are_kvpools_own_streamed_or_not(served: Served, seen: Seen) -> None:
    own = await served.own_chat(messages_about(seen.client.subject))
    driving.assert_are_kvpools_own(own, seen.chats)


@pytest.mark.parametrize("seen", [name for name in TEXTS if CLIENTS[name].text_usage], indirect=True)
async def test_texts_are_kvpools_own_streamed_or_not(served: Served, seen: Seen) -> None:
    driving.assert_are_kvpools_own(await served.own_text(text_about(seen.client.subject)), seen.texts)


@pytest.mark.parametrize("seen", [name for name in TEXTS if not CLIENTS[name].text_usage], indirect=True)
async def test_texts_without_usage_are_kvpools_own_streamed_or_not(served: Served, seen: Seen) -> None:
    own = await served.own_text(text_about(seen.client.subject))
    assert seen.texts == [own.text, own.text]


@pytest.mark.parametrize("seen", NAMES, indirect=True)
async def test_what_kvpool_cannot_do_is_the_clients_own_exception_with_our_words(seen: Seen) -> None:
    client = seen.client
    assert seen.refused.keys() == client.refused.keys()
    for asked, param in client.refused.items():
        refused = seen.refused[asked]
        assert (refused["exception"], refused["status"]) == (client.exception, 400), asked
        assert driving.refusal(param) in refused["message"], asked
        if client.passes_param_on:
            assert refused["param"] == param, asked

"""Clients of OpenAI's API before kvpool, each in its own environment: `drivers/` use them as their users do."""

from __future__ import annotations

import pytest

from tests.clients import driving
from tests.clients.served import Served, messages_about, text_about
from tests.clients.table import CLIENTS, chosen

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


@pytest.mark.parametrize("name", chosen(CLIENTS))
async def test_a_client_passes_on_kvpools_own_answers_and_what_it_refuses(name: str, served: Served) -> None:
    client = CLIENTS[name]
    seen = await driving.drive(name, served, client.subject)
    if client.chats:
        driving.assert_are_kvpools_own(await served.own_chat(messages_about(client.subject)), seen["chats"])
    if client.texts:
        own = await served.own_text(text_about(client.subject))
        if client.text_usage:
            driving.assert_are_kvpools_own(own, seen["texts"])
        else:
            assert seen["texts"] == [own.text, own.text]
    assert seen["refused"].keys() == client.refused.keys()
    for asked, param in client.refused.items():
        refused = seen["refused"][asked]
        assert (refused["exception"], refused["status"]) == (client.exception, 400), asked
        assert driving.refusal(param) in refused["message"], asked
        if client.passes_param_on:
            assert refused["param"] == param, asked

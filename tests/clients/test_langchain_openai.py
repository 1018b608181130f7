"""langchain-openai before kvpool."""

from __future__ import annotations

from typing import Any, Final

import pytest
import pytest_asyncio

from tests.clients import driving
from tests.clients.served import Served, text_about

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

SUBJECT: Final = "Volcanoes"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seen(served: Served) -> dict[str, Any]:
    return await driving.drive("langchain-openai", served, SUBJECT)


async def test_chats_are_kvpools_own_streamed_or_not(served: Served, seen: dict[str, Any]) -> None:
    await driving.assert_chat_is_kvpools_own(served, SUBJECT, seen["chat"], seen["chat_streamed"], seen["chat_async"])


async def test_texts_are_kvpools_own_streamed_or_not(served: Served, seen: dict[str, Any]) -> None:
    """langchain drops the details of the usage of a text."""
    own = await served.own_text(text_about(SUBJECT))
    assert (seen["text"], seen["text_streamed"]) == (own.text, own.text)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ("tools", "tools"),
        ("function_calling", "tool_choice"),
        ("json_schema", "response_format"),
        ("json_mode", "response_format"),
    ],
)
async def test_what_kvpool_cannot_do_is_openais_bad_request_with_our_words(
    seen: dict[str, Any], asked: str, param: str
) -> None:
    assert (seen[asked]["status"], seen[asked]["param"]) == (400, param)
    assert driving.refusal(param) in seen[asked]["message"]

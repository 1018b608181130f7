"""litellm before kvpool."""

from __future__ import annotations

from typing import Any, Final

import pytest
import pytest_asyncio

from tests.clients import driving
from tests.clients.served import Served

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

SUBJECT: Final = "Glaciers"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seen(served: Served) -> dict[str, Any]:
    return await driving.drive("litellm", served, SUBJECT)


async def test_chats_are_kvpools_own_streamed_or_not(served: Served, seen: dict[str, Any]) -> None:
    answers = seen["chat"], seen["chat_streamed"], seen["chat_async"]
    await driving.assert_chat_is_kvpools_own(served, SUBJECT, *answers)


async def test_texts_are_kvpools_own_streamed_or_not(served: Served, seen: dict[str, Any]) -> None:
    await driving.assert_text_is_kvpools_own(served, SUBJECT, seen["text"], seen["text_streamed"])


async def test_what_kvpool_cannot_do_is_litellms_bad_request_with_our_words(seen: dict[str, Any]) -> None:
    assert (seen["tools"]["status"], seen["response_format"]["status"]) == (400, 400)
    assert driving.refusal("tools") in seen["tools"]["message"]
    assert driving.refusal("response_format") in seen["response_format"]["message"]

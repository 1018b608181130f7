"""pydantic-ai before kvpool."""

from __future__ import annotations

from typing import Any, Final

import pytest
import pytest_asyncio

from tests.clients import driving
from tests.clients.served import Served

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

SUBJECT: Final = "Harbours"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seen(served: Served) -> dict[str, Any]:
    return await driving.drive("pydantic-ai", served, SUBJECT)


async def test_chats_are_kvpools_own_streamed_or_not(served: Served, seen: dict[str, Any]) -> None:
    await driving.assert_chat_is_kvpools_own(served, SUBJECT, seen["chat"], seen["chat_streamed"])


@pytest.mark.parametrize(
    ("asked", "param"), [("tools", "tools"), ("output_tool", "tool_choice"), ("output_schema", "response_format")]
)
async def test_what_kvpool_cannot_do_is_its_http_error_with_our_words(
    seen: dict[str, Any], asked: str, param: str
) -> None:
    assert (seen[asked]["status"], seen[asked]["param"]) == (400, param)
    assert driving.refusal(param) in seen[asked]["message"]

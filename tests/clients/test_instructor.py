"""instructor before kvpool: it needs grammars, so it must get the reason why there are none."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from tests.clients import driving
from tests.clients.served import Served

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seen(served: Served) -> dict[str, Any]:
    return await driving.drive("instructor", served, "Cathedrals")


@pytest.mark.parametrize(("mode", "param"), [("tools", "tool_choice"), ("json_schema", "response_format")])
async def test_instructors_own_exception_has_our_words(seen: dict[str, Any], mode: str, param: str) -> None:
    assert (seen[mode]["kind"], seen[mode]["param"]) == ("InstructorRetryException", param)
    assert driving.refusal(param) in seen[mode]["message"]

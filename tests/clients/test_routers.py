"""Routers of other projects in front of two gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.clients.routers import Router, routing
from tests.clients.served import Served
from tests.clients.table import ROUTERS, chosen

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=chosen(ROUTERS))
async def router(
    request: pytest.FixtureRequest, served: Served, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Router]:
    name = request.param
    async with routing(name, ROUTERS[name], served, tmp_path_factory.mktemp(name)) as router:
        yield router


async def test_chats_and_texts_are_kvpools_own_streamed_or_not(router: Router) -> None:
    await router.answers()


async def test_what_kvpool_cannot_do_is_refused_in_our_words(router: Router) -> None:
    await router.refuses()


async def test_both_gateways_are_used(router: Router) -> None:
    await router.uses_both()


async def test_a_gateway_that_is_killed_loses_no_chat_and_is_used_again(router: Router) -> None:
    await router.goes_on_without_one()

"""How a worker finds out that its session does not work, what it does then, and how it leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvpool.cache_service import worker_codec
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Root
from kvpool.cache_service.servicer import make_session_key
from kvpool.worker_service.cache.link_state import MAX_STALE_CALLS
from tests.until import until
from tests.worker_service.world import FINGERPRINT, Wire, World, read_right

pytestmark = pytest.mark.usefixtures("brief_backoff")

PROMPT = list(range(20))


@contextlib.asynccontextmanager
async def one_stream(num_tokens: int) -> AsyncIterator[World]:
    """A world in which one request decodes. In the end its text must be the right one."""
    world = World(num_blocks=200, block_size=4)
    world.model.step_seconds = 0.003
    async with world.running():
        request = world.submit(PROMPT, num_tokens)
        reading = asyncio.create_task(read_right(request))
        await until(lambda: request.num_generated > 4)
        yield world
        await reading


async def test_three_stale_calls_in_a_row_end_the_session_with_one_log_line() -> None:
    """Another peer has executed a call of a far larger number: every call is stale until 2**20 more are sent. The worker registers
    again, with a report, and no stream notices."""
    async with one_stream(150) as world:
        session = world.manager.worker("w0")
        with capture_logs() as lines:
            session.last_call_no += 1 << 20
            await until(lambda: world.manager.worker("w0") is not session and world.is_open.is_set())
            # The engine says so between two steps, perhaps after the link has registered.
            await until(lambda: any(line["event"] == "session ended" for line in lines))
        told = sorted((line["event"], line) for line in lines if line["log_level"] != "debug")
        assert [event for event, _ in told] == ["registered", "session ended"]
        assert "STALE_CALL" in told[1][1]["why"]
        assert sum(line["event"] == "call not executed" for line in lines) == MAX_STALE_CALLS == 3


async def test_a_stale_call_now_and_then_ends_nothing() -> None:
    """Only those in a row count: a call that was executed in between shows that the numbers are ours."""
    async with World(num_blocks=60, block_size=4).running() as world:
        session = world.manager.worker("w0")
        for turn in range(6):
            session.last_call_no += 2  # two calls of ours are stale, the third is not
            await world.answered([turn, *PROMPT], 3)
        assert world.manager.worker("w0") is session
        assert world.link.num_failed_calls >= 12


@pytest.mark.parametrize("name", ["KeepAlive", "Append"])
async def test_a_worker_whose_key_is_refused_registers_again(name: str) -> None:
    """A manager that takes the session for another's: as if it had ended."""
    async with one_stream(60) as world:
        if name == "Append":
            world.link._keep_alive_seconds = 60.0  # the heartbeat after the next comes too late to be first
            beats = world.wire.num_calls.get("KeepAlive", 0)
            await until(lambda: world.wire.num_calls.get("KeepAlive", 0) > beats)
        session = world.manager.worker("w0")
        session.key = make_session_key()
        await until(lambda: world.manager.worker("w0") is not session and world.is_open.is_set())


async def test_an_unheard_worker_does_not_say_that_it_serves() -> None:
    """When no heartbeat was answered for the length of the lease; and as soon as one is, it serves again."""
    world = World(num_blocks=60, block_size=4)
    world.wire.lease_ms = 200
    async with world.running():
        await until(lambda: world.wire.num_calls.get("KeepAlive"))
        with capture_logs() as lines:
            world.wire.is_cut = True
            await until(lambda: not world.is_open.is_set())
            for _ in range(3):
                beats = world.wire.num_calls["KeepAlive"]
                await until(lambda: world.wire.num_calls["KeepAlive"] > beats)  # noqa: B023
            assert not world.is_open.is_set()
            session = world.cache.session
            world.wire.is_cut = False
            await until(world.is_open.is_set)
        assert world.cache.session == session, "this manager has not ended it"
        warnings = [line["event"] for line in lines if line["log_level"] == "warning"]
        assert warnings == ["session does not work"]
        await world.answered(PROMPT, 4)


async def test_a_heartbeat_acknowledges_the_last_answer_received_and_the_first_after_a_loss_at_once() -> None:
    """The manager renews the lease for that, so the worker does not keep it waiting for the next interval."""
    world = World(num_blocks=60, block_size=4)
    acks: list[int] = []
    execute = world.wire._execute

    def note(name: str, request: Any) -> Any:
        response = execute(name, request)
        world.wire.lose_reply = 0.0
        if name == "KeepAlive":
            acks.append(request.answer_ack)
            world.wire.lose_reply = float(len(acks) in (2, 3, 4))
            if len(acks) == 5:
                world.link._keep_alive_seconds = 3600.0
        return response

    world.wire._execute = note  # type: ignore[method-assign]
    async with world.running():
        await until(lambda: len(acks) == 6)
    assert acks == [0, 1, 1, 1, 1, 5]


async def test_a_worker_outgrows_a_register_no_that_is_not_its_own() -> None:
    """A stranger has registered under its name and incarnation, as far ahead as the manager takes."""
    async with one_stream(60) as world:
        introduction = world.link._registration.introduction
        stolen = worker_codec.decode_registration(introduction)._replace(register_no=1 << 63)
        taken = world.manager.register(stolen, world.wire.now(), make_session_key())
        await until(lambda: world.manager.worker("w0").number > taken.session and world.is_open.is_set())
        assert world.wire.num_calls["Register"] <= 4, "it is told which number to outgrow"


# -- leaving


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_worker_that_leaves_while_it_registers(is_answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session that it begins in order to end it waits for a report that never comes: Route must not name it. Unanswered, the
    worker says so in its log, and goes. That no session outlives it, whenever its Register comes, is in tests/simulation."""
    monkeypatch.setattr("kvpool.worker_service.manager_link.LEAVE_SECONDS", 20.0 if is_answered else 0.05)
    wire = Wire(CacheManager(1))
    wire.is_cut = True
    routes: list[Any] = []
    execute = wire._execute

    def note(name: str, request: Any) -> Any:
        answer = execute(name, request)
        routes.append(wire.manager.route(Root(FINGERPRINT), bytes(8)))
        return answer

    wire._execute = note  # type: ignore[method-assign]
    world = World(num_blocks=60, block_size=4, wire=wire)
    link = asyncio.create_task(world.link.talk_to(wire))  # type: ignore[arg-type]
    await until(lambda: wire.num_calls.get("Register"))
    wire.is_cut = not is_answered
    link.cancel()
    with capture_logs() as lines:
        await asyncio.wait_for(asyncio.gather(link, return_exceptions=True), 20)
    assert [line["event"] for line in lines] == ([] if is_answered else ["left without deregistering"])
    assert (len(routes), any(routes)) == (2 * is_answered, False)
    assert wire.manager.sessions == ()
    assert world.link.has_left is is_answered

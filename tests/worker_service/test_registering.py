"""A worker whose Register is refused: it waits where that helps, gives up where it does not, and drops its blocks when told to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpool.cache_service import worker_codec
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import WorkerLoad
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.v1 import cache_pb2
from kvpool.worker_service.cache.link_state import BACKOFF_FIRST_SECONDS, BACKOFF_MOST_SECONDS, LinkState
from kvpool.worker_service.engine.errors import ErrorKind
from kvpool.worker_service.manager_link import RegistrationRefused
from kvpool.worker_service.registration import POLL_SECONDS, Patience
from tests.until import until
from tests.worker_service.world import Wire, World, failed

LEASE_SECONDS = 0.2


# -- how long it waits


@pytest.mark.parametrize(
    ("asked", "last"),
    [
        ([(6.0, float(second), POLL_SECONDS) for second in range(18)], (6.0, 18.0)),
        ([(0.5, 0.0, 0.5), (0.0, 0.0, 0.2), (2.0, 0.0, POLL_SECONDS)], (2.0, 6.0)),
        ([(1.0, 0.0, POLL_SECONDS), (12.0, 2.9, POLL_SECONDS), (5.0, 35.9, POLL_SECONDS)], (5.0, 36.0)),
    ],
    ids=["often, since the other may leave early", "a short wait is kept", "a longer wait is more patience"],
)
def test_it_asks_until_three_times_the_longest_wait_is_over(
    asked: list[tuple[float, float, float]], last: tuple[float, float]
) -> None:
    """What it is told to wait, when, and how long it waits. Another answer in between begins it anew."""
    patience = Patience()
    assert not patience.is_waiting
    for wait, now, pause in asked:
        assert patience.pause(wait, now) == pause
    assert patience.is_waiting
    assert patience.pause(*last) is None
    patience.restore()
    assert not patience.is_waiting
    assert patience.pause(*last) is not None


def test_the_pause_between_failed_calls_grows_up_to_a_bound() -> None:
    """A manager that comes back after an hour is called within the bound; an answer starts over."""
    link = LinkState(1)
    pauses = []
    for second in range(20):
        link.failed(float(second))
        pauses.append(round(link.retry_at - second, 6))
    assert pauses[0] == BACKOFF_FIRST_SECONDS
    assert pauses == sorted(pauses)
    assert pauses[-1] == max(pauses) == BACKOFF_MOST_SECONDS
    link.succeeded()
    link.failed(0.0)
    assert link.retry_at == BACKOFF_FIRST_SECONDS


# -- over the manager's core


@contextlib.asynccontextmanager
async def with_another_process(world: World, *, is_alive: bool, incarnation: int) -> AsyncIterator[int]:
    """Another process has the worker's name; the manager ticks, and that process renews its lease as long as it `is_alive`."""
    manager = world.wire.manager = CacheManager(1, lease_seconds=LEASE_SECONDS, tick_seconds=60.0)
    other = cache_pb2.RegisterRequest()
    other.CopyFrom(world.link._registration.introduction)
    other.incarnation, other.register_no, other.process_key = incarnation, 1, b"another"
    session = manager.register(worker_codec.decode_registration(other), world.wire.now()).session

    async def tick() -> None:
        while True:
            if is_alive:
                manager.keep_alive(session, 0, WorkerLoad(), world.wire.now())
            manager.tick(world.wire.now())
            await asyncio.sleep(0.02)

    ticking = asyncio.create_task(tick())
    try:
        yield session
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)


@pytest.mark.parametrize("incarnation", [1, 9])
async def test_a_worker_gives_up_while_the_other_process_lives(incarnation: int) -> None:
    """Newer or older than that one: it says what can be done about it."""
    world = World(num_blocks=20, block_size=4)
    world.link._registration.introduction.incarnation = 7
    async with with_another_process(world, is_alive=True, incarnation=incarnation) as session:
        with pytest.raises(RegistrationRefused) as caught:
            await world.link.talk_to(world.wire)  # type: ignore[arg-type]
        assert [live.number for live in world.manager.sessions] == [session]
    for cure in ("stop that process", "another --worker-id", "restart the manager", "Ask again in"):
        assert cure in str(caught.value)
    assert ("WORKER_ELSEWHERE" if incarnation < 7 else "STALE_INCARNATION") in str(caught.value)
    assert world.wire.num_calls["Register"] > 2


# -- a manager that cannot outgrow what the worker has seen


class _ForeignWire(Wire):
    """The manager has lost its state file, and does not raise its epoch."""

    def __init__(self, manager: CacheManager) -> None:
        super().__init__(manager)
        self.requests: list[cache_pb2.RegisterRequest] = []

    def _execute(self, name: str, request: Any) -> Any:
        if name == "Register":
            self.requests.append(request)
            if request.highest_epoch_seen > self.manager.epoch:
                raise Refusal(Reason.FOREIGN_EPOCH, "drop all blocks")
        return super()._execute(name, request)


async def test_a_worker_that_is_told_to_drops_its_blocks_and_serves_again() -> None:
    """In the middle of a stream, which ends with UNAVAILABLE; it registers holding nothing, and new requests are answered under
    generations that are smaller than those it has forgotten."""
    wire = _ForeignWire(CacheManager(1 << 20))
    async with World(num_blocks=40, block_size=4, wire=wire).running() as world:
        await world.answered(list(range(9)), 5)
        await world.until_idle()
        gate = world.model.gate = threading.Event()
        request = world.submit(list(range(30, 45)), 20)
        await until(lambda: request.sequence.in_step)
        wire.manager = CacheManager(1)
        await until(lambda: wire.requests[-1].highest_epoch_seen == 1 << 20 and wire.requests[-1].holds_state)
        assert not world.is_open.is_set()
        gate.set()
        _, error = await failed(request)
        assert error.kind is ErrorKind.UNAVAILABLE
        assert "drop all blocks" in error.message
        await until(world.is_open.is_set)
        last = wire.requests[-1]
        assert (last.highest_epoch_seen, last.last_session, last.holds_state) == (0, 0, False)
        assert world.link.highest_epoch == 1
        await world.answered(list(range(9)), 5)
        assert world.manager.worker("w0").pools[0].generation(1) >> 40 == 1

"""A worker whose Register is refused: it waits where that helps, gives up where it does not, and drops its blocks when told to."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.v1 import cache_pb2
from kvpool.worker_service.cache.link_state import BACKOFF_FIRST_SECONDS, BACKOFF_MOST_SECONDS, LinkState
from kvpool.worker_service.engine.errors import ErrorKind
from kvpool.worker_service.manager_link import RegistrationRefused
from kvpool.worker_service.registration import POLL_SECONDS, Patience
from tests.until import until
from tests.worker_service.world import Wire, World, failed

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


@pytest.mark.parametrize("reason", [Reason.WORKER_ELSEWHERE, Reason.STALE_INCARNATION])
async def test_a_worker_gives_up_while_another_process_has_its_name(reason: Reason) -> None:
    """After some refusals, the last of which it passes on."""
    world = World(num_blocks=20, block_size=4)

    def refuse(name: str, request: Any) -> Any:
        raise Refusal(reason, "another process has this name", retry_seconds=0.2)

    world.wire._execute = refuse  # type: ignore[method-assign]
    with pytest.raises(RegistrationRefused, match=rf"another process has this name \({reason.value}\)"):
        await world.link.talk_to(world.wire)  # type: ignore[arg-type]
    assert world.wire.num_calls["Register"] > 2


# -- a manager that cannot outgrow what the worker has seen


async def test_a_worker_that_is_told_to_drops_its_blocks_and_serves_again() -> None:
    """The manager has lost its state file, and does not raise its epoch. The stream that runs ends with UNAVAILABLE; the worker
    registers holding nothing, and new requests are answered under smaller generations than those that it has forgotten."""
    wire = Wire(CacheManager(1 << 20))
    requests: list[cache_pb2.RegisterRequest] = []
    execute = wire._execute

    def refuse(name: str, request: Any) -> Any:
        if name == "Register":
            requests.append(request)
            if request.highest_epoch_seen > wire.manager.epoch:
                raise Refusal(Reason.FOREIGN_EPOCH, "drop all blocks")
        return execute(name, request)

    wire._execute = refuse  # type: ignore[method-assign]
    async with World(num_blocks=40, block_size=4, wire=wire).running() as world:
        await world.answered(list(range(9)), 5)
        await world.until_idle()
        gate = world.model.gate = threading.Event()
        request = world.submit(list(range(30, 45)), 20)
        await until(lambda: request.sequence.in_step)
        wire.manager = CacheManager(1)
        await until(lambda: requests[-1].highest_epoch_seen == 1 << 20 and requests[-1].holds_state)
        assert not world.is_open.is_set()
        gate.set()
        _, error = await failed(request)
        assert error.kind is ErrorKind.UNAVAILABLE
        assert "drop all blocks" in error.message
        await until(world.is_open.is_set)
        last = requests[-1]
        assert (last.highest_epoch_seen, last.last_session, last.holds_state) == (0, 0, False)
        assert world.link.highest_epoch == 1
        await world.answered(list(range(9)), 5)
        assert world.manager.worker("w0").pools[0].generation(1) >> 40 == 1

"""One holder at a time, each with a larger epoch, over an API server that follows the documented rules and fails as networks do.

Time is virtual: the loop's clock jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from kvpool.cache_service.election.epoch import MAX_EPOCH, LeadershipLost, StateError
from kvpool.cache_service.election.kubernetes import EPOCH_ANNOTATION, SHARE_TO_USE, LeaseEpochs, LeaseName
from tests.cache_service.election.api_server import ApiServer, Lost

DURATION = 5
NAME = "manager"


@pytest.fixture
def api() -> ApiServer:
    return ApiServer()


def now() -> float:
    return asyncio.get_running_loop().time()


async def lose(_: httpx.Request) -> None:
    raise Lost


class Process:
    def __init__(
        self, api: ApiServer, *, pace: float = 1.0, folder: Path = Path("/nowhere"), duration: int = DURATION
    ) -> None:
        self.store = LeaseEpochs(
            LeaseName("default", NAME),
            duration=duration,
            api="http://api",
            service_account=folder,
            clock=lambda: now() * pace,
            transport=api,
        )
        self.task = asyncio.create_task(self._run())
        self.led = asyncio.Event()
        self.led_at = 0.0
        self.ended: BaseException | None = None

    async def _run(self) -> None:
        try:
            await self.store.lead()
            self.led_at = now()
            self.led.set()
            await self.store.keep()
        except (LeadershipLost, StateError) as error:
            self.ended = error

    async def kill(self) -> None:
        """As by SIGKILL: nothing is released."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def stop(self) -> None:
        """As by SIGTERM."""
        await self.kill()
        await self.store.release()


@contextlib.asynccontextmanager
async def processes(api: ApiServer, *paces: float) -> AsyncIterator[list[Process]]:
    started = []
    for pace in paces or (1.0, 1.0):
        started.append(Process(api, pace=pace))
        if len(started) == 1:
            await started[0].led.wait()
    try:
        yield started
    finally:
        for process in started:
            await process.stop()


async def test_the_first_leads_and_after_its_release_the_next_does_at_once_with_a_larger_epoch(api: ApiServer) -> None:
    async with processes(api) as (first, second):
        await asyncio.sleep(20 * DURATION)
        assert (first.store.epoch, second.store.epoch) == (1, 0)
        assert (first.store.leads(), second.store.leads()) == (True, False)
        assert (first.store.found_state, second.store.found_state) == (False, False)
        lease = api.leases[NAME]
        assert lease["metadata"]["annotations"] == {EPOCH_ANNOTATION: "1"}
        assert lease["spec"]["holderIdentity"] == first.store.identity
        assert lease["spec"]["leaseDurationSeconds"] == DURATION
        released_at = now()
        await first.stop()
        assert not first.store.leads()
        await second.led.wait()
        assert second.led_at - released_at < 0.1
        assert (second.store.epoch, second.store.found_state) == (2, True)
        assert api.leases[NAME]["spec"]["leaseTransitions"] == 1


@pytest.mark.parametrize("watch", ["works", "ends", "too old"])
async def test_after_a_kill_the_next_leads_when_the_lease_is_over_and_not_before(api: ApiServer, watch: str) -> None:
    """Whether the watch by which it waits works or not."""
    if watch == "ends":
        api.watch_seconds = 0.3
    if watch == "too old":
        api.oldest_version = 1 << 40
    async with processes(api) as (first, second):
        await asyncio.sleep(3 * DURATION + 3.3)
        await first.kill()
        killed_at = now()
        while first.store.leads():
            await asyncio.sleep(0.01)
        assert not second.led.is_set()
        await second.led.wait()
        assert DURATION / 2 < second.led_at - killed_at <= DURATION + (watch != "works")
        assert second.store.epoch == 2


@pytest.mark.parametrize("durations", [(10, 3, 6), (3, 10, 6)])
async def test_how_long_a_lease_is_its_holder_decides(api: ApiServer, durations: tuple[int, ...]) -> None:
    """Processes with other settings, as during an update: one that stands by waits for the holder's duration, not for its own, and
    states its own when it leads."""
    holder: Process | None = None
    for duration in durations:
        process = Process(api, duration=duration)
        if holder is not None:
            await asyncio.sleep(1.0)
            await holder.kill()
            while holder.store.leads():
                assert not process.led.is_set(), "two lead"
                await asyncio.sleep(0.1)
        await process.led.wait()
        assert api.leases[NAME]["spec"]["leaseDurationSeconds"] == duration
        holder = process
    assert holder is not None
    await holder.stop()


@pytest.mark.parametrize("status", ["silent", "refuses", "lost"])
async def test_a_holder_that_cannot_renew_ends_before_its_lease_does(api: ApiServer, status: str) -> None:
    async def fail(request: httpx.Request) -> None:
        if status == "silent":
            raise httpx.ReadTimeout("timed out", request=request)
        if status == "lost":
            await lose(request)
        api.token = "another"

    async with processes(api, 1.0) as (first,):
        written_at = now()
        api.before = fail
        await first.task
        assert isinstance(first.ended, LeadershipLost)
        assert "could not be renewed in time" in str(first.ended)
        assert now() - written_at <= SHARE_TO_USE * DURATION
        assert not first.store.leads()


async def test_a_renewal_counts_from_when_it_was_sent(api: ApiServer) -> None:
    """Others count from when they see it, which may be long before its answer comes."""
    written_at = 0.0

    async def answer_late(request: httpx.Request) -> None:
        nonlocal written_at
        if request.method == "PUT":
            written_at = now()
            await asyncio.sleep(0.15 * DURATION)

    async with processes(api, 1.0) as (first,):
        api.after = answer_late
        await asyncio.sleep(DURATION)
        api.before = lose
        await first.task
        assert 0 < now() - written_at <= SHARE_TO_USE * DURATION


async def test_one_that_hears_too_late_that_it_holds_the_lease_does_not_lead(api: ApiServer) -> None:
    """It was frozen meanwhile, and another one has taken over."""
    is_first = True

    async def freeze(request: httpx.Request) -> None:
        nonlocal is_first
        if request.method == "PUT" and is_first:
            is_first = False
            await asyncio.sleep(3 * DURATION)

    api.after = freeze
    first = Process(api)
    await asyncio.sleep(0.1)
    second = Process(api)
    await second.led.wait()
    assert (api.leases[NAME]["spec"]["holderIdentity"], second.store.epoch) == (second.store.identity, 2)
    await asyncio.sleep(4 * DURATION)
    assert not first.led.is_set()
    assert first.ended is None
    assert second.store.leads()
    await second.stop()
    await first.led.wait()
    assert first.store.leads()
    assert first.store.epoch == 3
    await first.stop()


async def test_a_renewal_whose_answer_is_lost_is_written_again(api: ApiServer) -> None:
    """That it was applied is seen in the Lease; but not when: only the second one counts."""
    num_lost = 0

    async def lose_three(request: httpx.Request) -> None:
        nonlocal num_lost
        if request.method == "PUT" and num_lost < 3:
            num_lost += 1
            await lose(request)

    async with processes(api) as (first, second):
        api.after = lose_three
        await asyncio.sleep(4 * DURATION)
        assert num_lost == 3
        assert first.ended is None
        assert first.store.leads()
        assert first.store.epoch == 1
        assert not second.led.is_set()


async def test_a_lease_that_another_process_has_taken_ends_its_holder_at_once(api: ApiServer) -> None:
    async with processes(api, 1.0) as (first,):
        body = api.leases[NAME]
        body["spec"]["holderIdentity"] = "kubectl edit"
        api.write(NAME, body)
        changed_at = now()
        await first.task
        assert isinstance(first.ended, LeadershipLost)
        assert "kubectl edit holds it" in str(first.ended)
        assert now() - changed_at <= DURATION / 2


async def test_a_deleted_lease_is_lost_state(api: ApiServer) -> None:
    """The next epoch is 1 again: workers that have seen a larger one make the manager raise it (foreign_epochs.py)."""
    async with processes(api) as (first, second):
        await asyncio.sleep(1.0)
        api.delete(NAME)
        await first.task
        assert isinstance(first.ended, LeadershipLost)
        await second.led.wait()
        assert (second.store.epoch, second.store.found_state) == (1, False)


async def test_an_epoch_is_raised_in_the_lease_and_renewals_keep_it(api: ApiServer) -> None:
    async with processes(api) as (first, second):
        assert [await first.store.raise_above(epoch) for epoch in (0, 9, 9, 3)] == [1, 10, 10, 10]
        assert api.leases[NAME]["metadata"]["annotations"][EPOCH_ANNOTATION] == "10"
        await asyncio.sleep(3 * DURATION)
        assert api.leases[NAME]["metadata"]["annotations"][EPOCH_ANNOTATION] == "10"
        await first.stop()
        await second.led.wait()
        assert second.store.epoch == 11


async def test_an_epoch_is_not_raised_after_a_release(api: ApiServer) -> None:
    """By a call that has waited for another write while the process was told to stop."""

    async def answer_late(_: httpx.Request) -> None:
        await asyncio.sleep(0.5)

    async with processes(api, 1.0) as (first,):
        api.after = answer_late
        raising = [asyncio.create_task(first.store.raise_above(epoch)) for epoch in (5, 7)]
        await asyncio.sleep(0.1)
        await first.stop()
        raised, refused = await asyncio.gather(*raising, return_exceptions=True)
        assert raised == 6
        assert isinstance(refused, LeadershipLost)
        assert "was given back" in str(refused)


async def test_an_epoch_that_was_written_is_not_taken_back_by_a_renewal(api: ApiServer) -> None:
    """Its answer was lost, and what the Lease is now could not be read: the next renewal finds the larger epoch there. One that was
    not written is not used."""
    async with processes(api, 1.0) as (first,):
        api.before, nothing = lose, api.before
        with pytest.raises(StateError, match="epoch 8 cannot be written to lease default/manager"):
            await first.store.raise_above(7)
        assert first.store.epoch == 1
        api.before, api.after = nothing, lose
        with pytest.raises(StateError, match="epoch 8 cannot be written"):
            await first.store.raise_above(7)
        api.after = nothing
        await asyncio.sleep(DURATION)
        assert api.leases[NAME]["metadata"]["annotations"][EPOCH_ANNOTATION] == "8"
        assert (first.store.leads(), first.store.epoch) == (True, 8)


async def test_used_up_epochs_are_an_error_and_never_wrap(api: ApiServer) -> None:
    async with processes(api, 1.0) as (first,):
        assert await first.store.raise_above(MAX_EPOCH - 1) == MAX_EPOCH
        with pytest.raises(StateError, match="used up"):
            await first.store.raise_above(MAX_EPOCH)
        await first.stop()
        second = Process(api)
        await second.task
        assert "used up" in str(second.ended)


async def test_a_standby_outlives_every_answer_of_the_api_server_and_reads_its_token_again(
    api: ApiServer, tmp_path: Path
) -> None:
    """A process that ended would be started again after a pause that grows."""
    api.token = "first"
    process = Process(api, folder=tmp_path)
    await asyncio.sleep(100)
    assert process.ended is None
    assert len(api.requests) < 100
    (tmp_path / "token").write_text("first\n")
    await process.led.wait()
    api.token = "second"
    (tmp_path / "token").write_text("second\n")
    await asyncio.sleep(10 * DURATION)
    assert process.store.leads()
    await process.stop()


async def test_what_others_have_written_into_the_lease_is_kept(api: ApiServer) -> None:
    async with processes(api, 1.0) as (first,):
        body = api.leases[NAME]
        body["metadata"]["labels"] = {"app": "kvpool"}
        body["metadata"]["annotations"]["owner"] = "someone"
        body["spec"]["strategy"] = "OldestEmulationVersion"
        api.write(NAME, body)
        await asyncio.sleep(3 * DURATION)
        assert first.store.leads()
        lease = api.leases[NAME]
        assert lease["metadata"]["labels"] == {"app": "kvpool"}
        assert lease["metadata"]["annotations"]["owner"] == "someone"
        assert lease["spec"]["strategy"] == "OldestEmulationVersion"


def test_outside_a_pod_it_says_what_is_missing() -> None:
    with pytest.raises(StateError, match=r"KUBERNETES_SERVICE_HOST is not set.*--kubernetes-api"):
        LeaseEpochs(LeaseName("default", NAME), duration=DURATION, environment={})


@pytest.mark.parametrize("seed", range(40))
async def test_never_two_lead_and_no_epoch_repeats(api: ApiServer, seed: int) -> None:
    """Answers and requests are lost or late, processes are killed and started, clocks differ by five percent."""
    draw = random.Random(seed)
    loss = draw.choice((0.0, 0.1, 0.2))

    async def trouble(_: httpx.Request) -> None:
        if draw.random() < 0.3:
            await asyncio.sleep(draw.choice((0.01, 0.5, 2.0)))
        if draw.random() < loss:
            raise Lost

    api.before = api.after = trouble
    epochs: list[int] = []
    living: list[Process] = []
    num_leading = 0
    for _ in range(600):
        await asyncio.sleep(draw.uniform(0.0, 0.3))
        for process in living:
            if process.led.is_set() and process.store.epoch not in epochs:
                epochs.append(process.store.epoch)
        leading = [process for process in living if process.store.leads()]
        assert len(leading) <= 1
        num_leading += len(leading)
        if len(living) < 3 and draw.random() < 0.2:
            living.append(Process(api, pace=draw.uniform(0.95, 1.05)))
        if living and draw.random() < 0.03:
            gone = living.pop(draw.randrange(len(living)))
            await (gone.kill() if draw.random() < 0.7 else gone.stop())
        living = [process for process in living if process.ended is None]
    assert epochs == sorted(set(epochs))
    assert len(epochs) > 1
    assert num_leading > 20
    for process in living:
        await process.kill()

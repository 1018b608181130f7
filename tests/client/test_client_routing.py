"""Which worker answers: the ranking, those that are passed over, restarts, and several models."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2

from kvpool.cli.launch.cluster import free_port
from kvpool.client import (
    Cancelled,
    Client,
    ClientConfig,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    stream,
)
from kvpool.client.deadline import Deadline
from kvpool.client.failover import Failover
from kvpool.client.gate import Gate
from kvpool.v1 import cache_pb2
from tests.client.clients import quick
from tests.client.fakes import (
    UNAVAILABLE,
    FakeManager,
    FakeModel,
    FakeWorker,
    answer,
    error_status,
    fake_cluster,
    serving,
)
from tests.client.words import CAT, THE
from tests.until import until


@pytest.mark.parametrize("is_dead", [False, True], ids=["draining", "dead"])
async def test_a_worker_that_is_leaving_is_passed_over_with_a_larger_attempt(is_dead: bool) -> None:
    """The next ranked worker gets the same sequence under attempt 2, so that the first can never come back into it."""
    first, second = FakeWorker("w1", [UNAVAILABLE]), FakeWorker("w2")
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        if is_dead:  # its port is closed, but its lease still runs
            first.address = "127.0.0.1:1"
        completion = await client.generate("the", temperature=1.0).collect()
    assert (completion.worker_id, completion.num_attempts) == ("w2", 2)
    (last,) = second.requests
    assert last.attempt == 2
    assert last.sampling.seed != 0
    assert [(one.sequence_id, one.attempt, one.sampling.seed) for one in first.requests] == (
        [] if is_dead else [(last.sequence_id, 1, last.sampling.seed)]
    )
    assert len(manager.routes) == 1


async def test_services_on_other_machines_are_used() -> None:
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager:
        for service in (manager, worker):
            # This machine under an address that does not show it.
            service.address = service.address.replace("127.0.0.1", "0.0.0.0")
        async with quick(manager) as client:
            assert (await client.generate("the").collect()).worker_id == "w"


async def test_an_answer_that_comes_while_the_manager_is_asked_is_taken() -> None:
    """The lease has ended and the worker is about to be given up; its first token arrives in that moment."""
    may_answer = asyncio.Event()
    slow, other = FakeWorker("slow", [may_answer, *answer(CAT)]), FakeWorker("other")

    manager = FakeManager([slow])
    num_missing = 0

    async def look() -> None:
        """The second time that the manager no longer knows the worker, it takes so long to say so that the answer is there."""
        nonlocal num_missing
        if slow not in manager.workers:
            num_missing += 1
            if num_missing == 2:
                may_answer.set()
                await asyncio.sleep(0.2)

    manager.before_describe = look
    async with serving(slow, other, manager), quick(manager, liveness_interval=0.2) as client:
        task = asyncio.create_task(client.generate("the").collect())
        await slow.asked.wait()
        manager.workers = [other]
        completion = await task
    assert (completion.worker_id, completion.num_attempts) == ("slow", 1)
    assert num_missing == 2


async def test_when_no_worker_answers_the_error_has_what_each_one_said() -> None:
    first = FakeWorker("w1", [UNAVAILABLE])
    second = FakeWorker("w2", [error_status(code_pb2.UNAVAILABLE, "RECOVERING", "I am recovering")])
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        with pytest.raises(Unavailable, match=r"draining.*I am recovering.*draining.*I am recovering"):
            await client.generate("the").collect()
    assert [request.attempt for request in first.requests] == [1, 3]
    assert [request.attempt for request in second.requests] == [2, 4]
    assert len(manager.routes) == 2


async def test_of_several_full_workers_the_one_that_is_free_first_says_when_to_come_back() -> None:
    def full(seconds: int) -> FakeWorker:
        retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds))
        return FakeWorker(f"w{seconds}", [error_status(code_pb2.RESOURCE_EXHAUSTED, "BUSY", "queue full", retry)])

    async with fake_cluster(full(9), full(2), full(7)) as manager, quick(manager) as client:
        with pytest.raises(ResourceExhausted) as caught:
            await client.generate("the").collect()
    assert (caught.value.reason, caught.value.retry_after) == ("BUSY", 2.0)


async def test_a_lease_that_is_seen_again_has_not_ended() -> None:
    """Missing, there, missing: a manager that restarts twice. Only missing twice in a row means that the worker has gone."""
    may_answer = asyncio.Event()
    slow, other = FakeWorker("slow", [may_answer, *answer(CAT)]), FakeWorker("other")

    manager = FakeManager([slow, other])
    num_looks = 0

    async def look() -> None:
        """Every second one does not find the worker."""
        nonlocal num_looks
        if slow.asked.is_set():
            num_looks += 1
            manager.workers = [other] if num_looks % 2 else [slow, other]
            if num_looks == 6:
                may_answer.set()

    manager.before_describe = look
    async with serving(slow, other, manager), quick(manager) as client:
        completion = await client.generate("the").collect()
    assert (completion.worker_id, completion.num_attempts) == ("slow", 1)


@pytest.mark.parametrize(
    ("code", "exception"),
    [
        (code_pb2.INVALID_ARGUMENT, InvalidRequest),
        (code_pb2.FAILED_PRECONDITION, FailedPrecondition),
        (code_pb2.INTERNAL, ServiceError),
        (code_pb2.CANCELLED, Cancelled),
    ],
)
async def test_an_error_that_another_worker_would_repeat_is_raised_at_once(
    code: int, exception: type[Exception]
) -> None:
    first, second = FakeWorker("w1", [error_status(code, "NO", "no")]), FakeWorker("w2")
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        with pytest.raises(exception):
            await client.generate("the").collect()
    assert not second.requests


async def test_without_continuation_a_failure_behind_the_first_token_is_raised() -> None:
    first, second = FakeWorker("w1", [*answer(THE)[:1], UNAVAILABLE]), FakeWorker("w2")
    async with fake_cluster(first, second) as manager, quick(manager, continuation=False) as client:
        stream = client.generate("the")
        assert (await anext(stream)).token_ids == (THE,)
        with pytest.raises(Unavailable, match="w1"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert not second.requests


async def test_a_manager_that_never_was_there_is_told_at_once() -> None:
    async with Client(config=ClientConfig(manager=f"127.0.0.1:{free_port()}", first_contact=0.3)) as client:
        started = time.monotonic()
        with pytest.raises(Unavailable, match="kvpool up") as caught:
            await client.generate("the").collect()
    assert caught.value.reason == "NO_MANAGER"
    assert time.monotonic() - started < 20


async def test_a_first_answer_that_is_late_is_waited_for_once_more() -> None:
    """The time for the first contact may be over because this process stood still, not the manager."""
    async with fake_cluster() as manager, quick(manager, first_contact=0.01) as client:
        manager.seconds_to_answer = 60.0
        task = asyncio.create_task(client.route([1, 2, 3]))
        await until(lambda: manager.routes or task.done())
        assert not task.done()
        manager.seconds_to_answer = 0.0
        assert (await task).explanation == "none registered"
        assert len(manager.routes) >= 2


async def test_a_request_with_too_little_time_does_not_say_that_no_manager_is_there() -> None:
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager, quick(manager) as client:
        manager.seconds_to_answer = 20.0
        with pytest.raises(DeadlineExceeded, match=r"0\.1 s passed while asking the manager"):
            await client.generate([1, 2, 3], timeout=0.1).collect()


async def test_workers_that_register_late_are_waited_for() -> None:
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager, quick(manager, worker_wait=5.0) as client:
        manager.workers = []
        task = asyncio.create_task(client.generate("the").collect())
        await until(lambda: len(manager.describes) >= 2)
        manager.workers = [worker]
        assert (await task).worker_id == "w"


async def test_a_manager_that_restarts_is_waited_for_and_then_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Route is repeated while its port is closed and while it recovers, for longer than worker_wait."""
    now, num_looks = 0.0, 0

    def clock() -> float:
        nonlocal num_looks
        num_looks += 1
        return now

    worker = FakeWorker("w")
    manager = FakeManager([worker])
    async with serving(worker), AsyncExitStack() as first_life:
        await first_life.enter_async_context(serving(manager))
        async with quick(manager, worker_wait=1.0) as client:
            await client.generate("the").collect()
            await first_life.aclose()
            monkeypatch.setattr(stream, "Deadline", lambda seconds, _=None: Deadline(seconds, clock))
            task = asyncio.create_task(client.generate("the", timeout=20).collect())
            # It looks a few times for each call that nobody answers.
            await until(lambda: num_looks > 20)
            now = 1.2
            assert not task.done()
            manager.workers = []
            manager.routes.clear()
            manager.route_errors.append(error_status(code_pb2.UNAVAILABLE, "RECOVERING", "recovering"))
            async with serving(manager, port=int(manager.address.rpartition(":")[2])):
                await until(lambda: len(manager.routes) >= 2)
                looks = len(manager.describes)
                await until(lambda: len(manager.describes) > looks + 1)
                manager.workers = [worker]
                assert (await task).worker_id == "w"


async def test_without_any_worker_the_error_says_so() -> None:
    async with fake_cluster() as manager, quick(manager) as client:
        with pytest.raises(Unavailable, match="no live worker") as caught:
            await client.generate("the").collect()
    assert caught.value.reason == "NO_WORKER"


async def test_a_model_that_was_served_is_waited_for_while_others_are_back_already() -> None:
    """A restarted manager knows the first worker before the others. A name that was never served is refused at once."""
    mine, other = FakeWorker("w1"), FakeWorker("w2", model=FakeModel(name="other", fingerprint="fp-other"))
    async with fake_cluster(mine, other) as manager, quick(manager, worker_wait=30.0) as client:
        await client.generate("the", model="tiny").collect()
        manager.workers = [other]
        task = asyncio.create_task(client.generate("the", model="tiny").collect())
        looks = len(manager.describes)
        await until(lambda: len(manager.describes) >= looks + 2)
        assert not task.done()
        with pytest.raises(NotFound):
            await client.generate("the", model="tinny").collect()
        manager.workers = [mine, other]
        assert (await task).worker_id == "w1"


async def test_among_several_models_one_must_be_named() -> None:
    one, two = FakeWorker("w1"), FakeWorker("w2", model=FakeModel(name="big", fingerprint="fp-big"))
    async with fake_cluster(one, two) as manager, quick(manager) as client:
        with pytest.raises(InvalidRequest, match="big"):
            await client.generate("the").collect()
        with pytest.raises(NotFound, match="huge"):
            await client.generate("the", model="huge").collect()
        assert (await client.generate("the", model="big").collect()).worker_id == "w2"
        assert (await client.generate("the", model="fp-tiny").collect()).worker_id == "w1"


# -- the gate of a stream and the order of attempts, without any network


def test_tokens_of_an_older_attempt_are_dropped() -> None:
    gate = Gate()
    gate.open(1)
    gate.take(1, 0, 1)
    gate.open(2)
    assert gate.take(1, 1, 1) is None
    assert gate.num_delivered == 1
    assert gate.take(2, 0, 1) == 1
    with pytest.raises(AssertionError):
        gate.open(1)


def ranked(*names: str) -> list[cache_pb2.RoutedWorker]:
    return [cache_pb2.RoutedWorker(worker_id=name, address=f"{name}:1") for name in names]


def asked_in_vain(attempts: Failover, *names: str) -> list[tuple[str, int]]:
    """The manager ranks these workers, and each that is asked says no; returns who was asked in which attempt."""
    assert attempts.wants_ranking
    attempts.rank(ranked(*names))
    asked: list[tuple[str, int]] = []
    for _ in names:
        assert not attempts.wants_ranking
        target = attempts.next()
        asked.append((target.worker_id, target.attempt))
        attempts.failed(target, Unavailable(f"{target.worker_id} says no"))
    return asked


def test_attempts_are_bounded_however_many_workers_there_are() -> None:
    attempts = Failover(max_attempts=3)
    with pytest.raises(Unavailable, match="a says no; b says no; c says no"):
        asked_in_vain(attempts, "a", "b", "c", "d", "e")
    assert not attempts.wants_ranking


def test_one_worker_that_is_away_makes_full_ones_unavailable() -> None:
    """ResourceExhausted only if every worker was full: coming back later helps then, and only then for sure."""
    attempts = Failover(max_attempts=2)
    attempts.rank(ranked("a", "b"))
    attempts.failed(attempts.next(), ResourceExhausted("full", reason="FULL", retry_after=3.0))
    attempts.failed(attempts.next(), Unavailable("gone"))
    with pytest.raises(Unavailable) as caught:
        attempts.next()
    assert caught.value.retry_after == 3.0


def broken(max_attempts: int) -> Failover:
    """One answer on the workers a, b and c; a broke off after its first tokens."""
    attempts = Failover(max_attempts)
    attempts.rank(ranked("a", "b", "c"))
    attempts.broke_off(attempts.next(), Unavailable("a is gone"))
    return attempts


def test_an_answer_that_broke_off_is_ranked_again_at_once_and_its_worker_comes_last() -> None:
    """There are more tokens now, by which to rank. A worker that is back at another address has not failed."""
    attempts = broken(max_attempts=8)
    assert not attempts.wants_pause
    assert asked_in_vain(attempts, "a", "b", "c") == [("b", 2), ("c", 3), ("a", 4)]
    assert attempts.wants_pause
    attempts.rank([*ranked("b"), cache_pb2.RoutedWorker(worker_id="a", address="a:2")])
    assert attempts.next().address == "a:2"


def test_an_answer_that_has_begun_is_ranked_until_its_attempts_are_used_up() -> None:
    """A worker that is started again needs a while: longer than the two rankings that a new request gets."""
    attempts = broken(max_attempts=6)
    for number in range(2, 7):
        assert asked_in_vain(attempts, "a") == [("a", number)]
    assert not attempts.wants_ranking
    with pytest.raises(Unavailable, match="6 attempts: a is gone; a says no"):
        attempts.next()

"""A full queue: who is refused, who makes way, and when the refused are to come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.rpc import code_pb2

from kvpool.protocol.status import read_details
from kvpool.worker_service import status
from kvpool.worker_service.engine.admission import MOST_RETRY_SECONDS, UNKNOWN_RETRY_SECONDS, Admission, TokenRate
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.policy import SchedulingPolicy
from kvpool.worker_service.engine.request import Payer
from tests.worker_service.scheduler_world import SchedulerWorld


class Queue:
    """A full queue and its limits, without an engine."""

    def __init__(
        self, *, requests: int = 4, tokens: int = 1000, policy: SchedulingPolicy = SchedulingPolicy.fcfs
    ) -> None:
        self.world = SchedulerWorld(num_blocks=1000, scheduling_policy=policy)
        settings = self.world.engine.settings
        self.admission = Admission(replace(settings, max_num_waiting=requests, max_num_waiting_tokens=tokens))

    def measure(self, tokens_per_second: int, work: int, num_cached_tokens: int = 0) -> None:
        """At that rate for the ten seconds before 100, a request of `work` tokens has ended, of which the cache served some."""
        for tenth in range(100):
            self.admission.rate.note(tokens_per_second // 10, 0.1, 90.1 + tenth / 10)
        done = self.world.submit(work - 1, 1)
        done.num_generated, done.num_cached_tokens = 1, num_cached_tokens
        self.admission.on_finished(done)
        self.world.cancel(done)

    def fill(self, *nums_prompt: int, **params: Any) -> None:
        """Requests with so many prompt tokens wait."""
        for num_prompt in nums_prompt or (10,) * 4:
            self.world.submit(num_prompt, 1, **params)

    def ask(self, tenant: str = "", *, num_prompt: int = 10, priority: int = 0, now: float = 100.0) -> list[str]:
        """Names of those that make way. Raises EngineError."""
        payer = Payer(priority if self.world.scheduler.policy is SchedulingPolicy.priority else 0, tenant)
        making_way = self.admission.check(self.world.scheduler.waiting, payer, num_prompt, now)
        return [request.params.sequence_id for request in making_way]

    def refused(self, *asked: Any, **more: Any) -> EngineError:
        """The error of one that must be refused."""
        with pytest.raises(EngineError) as caught:
            self.ask(*asked, **more)
        assert caught.value.kind is ErrorKind.BUSY
        return caught.value


def test_the_refused_learn_when_there_will_be_room() -> None:
    """Work of a request / tokens per second for each place; who was refused before comes first; time passes."""
    queue = Queue()
    queue.measure(tokens_per_second=1000, work=500)
    queue.fill()
    assert [queue.refused(now=100.0).retry_seconds for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    assert queue.refused(now=101.0).retry_seconds == pytest.approx(
        1.0 * 500 / (10_000 / 11) / 0.5 * 0.5 + 0.5, rel=0.01
    )
    waits = [queue.refused(now=101.0).retry_seconds for _ in range(500)]
    assert waits == sorted(waits, key=lambda wait: wait or 0)
    assert waits[-1] == MOST_RETRY_SECONDS


def test_what_the_cache_served_is_no_work() -> None:
    """A second's worth of tokens, half of them from the cache: the place is free after half a second."""
    queue = Queue()
    queue.measure(tokens_per_second=1000, work=1000, num_cached_tokens=500)
    queue.fill()
    assert queue.refused().retry_seconds == pytest.approx(0.5)


def test_before_anything_is_measured_the_refused_get_a_fixed_time() -> None:
    queue = Queue()
    queue.fill()
    assert queue.refused().retry_seconds == UNKNOWN_RETRY_SECONDS


def test_a_refusal_says_what_there_is_and_what_to_change() -> None:
    queue = Queue(requests=2, tokens=70)
    queue.measure(tokens_per_second=100, work=100)
    queue.fill(30, 40)
    error = queue.refused()
    assert "2 requests with 70 prompt tokens are waiting, the limits are 2 and 70" in error.message
    assert "--max-num-waiting" in error.message
    answer = status.of_error(error)
    assert answer.code == code_pb2.RESOURCE_EXHAUSTED
    assert read_details(answer).retry_seconds == pytest.approx(error.retry_seconds, abs=0.001)


def test_prompt_tokens_that_wait_are_limited_too() -> None:
    """A few huge prompts do not hold the memory, but one may wait, however long it is. The time is that of as many requests as
    have to leave."""
    queue = Queue(tokens=100)
    queue.measure(tokens_per_second=1000, work=500)
    assert queue.ask(num_prompt=5000) == []
    queue.fill(50, 50)
    assert queue.refused(num_prompt=50).retry_seconds == pytest.approx(0.5)
    assert queue.refused(num_prompt=100).retry_seconds == pytest.approx(0.5 + 1.0)
    queue.world.cancel(queue.world.requests[-1])
    assert queue.ask(num_prompt=50) == []
    assert queue.world.scheduler.waiting.num_prompt_tokens == 50


def test_a_flood_of_one_tenant_does_not_lock_others_out() -> None:
    """They take places from it, youngest first, until all have the same."""
    queue = Queue(requests=5)
    queue.fill(tenant="flood")
    queue.fill(10, tenant="quiet")
    assert queue.ask("new") == ["3"]
    assert queue.ask("quiet") == ["3"]
    queue.world.cancel(queue.world.requests[3])
    queue.fill(10, tenant="quiet")
    queue.refused("quiet")
    queue.refused("flood")


def test_in_tokens_a_flood_of_few_long_prompts_makes_way_too() -> None:
    queue = Queue(tokens=1000)
    queue.fill(500, 480, tenant="long")
    assert queue.ask("short", num_prompt=100) == ["1"]
    queue.refused("short", num_prompt=600)


def test_a_better_priority_takes_the_place_of_a_worse_one() -> None:
    """The youngest of the worst level; under fcfs nobody's."""
    for policy in SchedulingPolicy:
        queue = Queue(policy=policy)
        for priority in (0, 2, 2, 1):
            queue.world.submit(10, 1, priority=priority)
        if policy is SchedulingPolicy.fcfs:
            queue.refused(priority=-1)
        else:
            assert queue.ask(priority=1) == ["2"]
            assert queue.ask(priority=1, num_prompt=980) == ["2", "1"]
            queue.refused(priority=2)


def test_what_the_manager_may_hold_blocks_for_makes_no_way() -> None:
    queue = Queue(requests=2)
    queue.fill(10, 10, tenant="a")
    queue.world.talk(lose_answer=True)
    queue.refused("b")


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = TokenRate(10.0)
    assert rate.tokens_per_second(5.0) == 0.0
    rate.note(50, 0.5, 5.0)
    assert rate.tokens_per_second(5.0) == pytest.approx(100)
    for second in range(6, 100):
        rate.note(1000, 1.0, float(second))
    assert rate.tokens_per_second(99.0) == pytest.approx(1000, rel=0.01)
    assert rate.tokens_per_second(1000.0) < 20
    assert len(rate._marks) <= 22


def test_a_running_request_that_has_more_to_compute_after_a_pause_pays_like_others() -> None:
    """As beams do that are resumed: their beginning is computed, they are forked, and only then is the rest of each to come. The
    accounts were closed meanwhile, because no tenant lacked anything."""
    world = SchedulerWorld(num_blocks=40, scheduling_policy=SchedulingPolicy.priority)
    request = world.submit(9, 8, tenant="a", priority=1)
    world.turns()
    world.whole_step()
    assert len(request.sequence.tokens) - request.sequence.num_computed_tokens == 1
    request.sequence.num_computed_tokens -= 3
    (scheduled,) = world.scheduler.schedule(0.0)
    assert (scheduled.request, scheduled.num_tokens) == (request, 4)

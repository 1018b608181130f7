"""The gate of a stream and the order of attempts, without any network."""

from __future__ import annotations

import pytest

from kvpool.client import ResourceExhausted, Unavailable
from kvpool.client.failover import Failover
from kvpool.client.gate import Gate
from kvpool.v1 import cache_pb2


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

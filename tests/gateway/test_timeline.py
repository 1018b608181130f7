"""The parts of an answer's time."""

from __future__ import annotations

from kvpool.client import Times
from kvpool.gateway.timeline import Timeline


def parts(timeline: Timeline) -> list[tuple[str, str, float]]:
    return [(part.state.value, part.worker_id, part.start_ms) for part in timeline.parts]


def seen(*chunks: tuple[int, str, float, bool]) -> Timeline:
    """Attempt, worker and time of each piece, and whether it has tokens."""
    timeline = Timeline()
    for attempt, worker, at, has_tokens in chunks:
        timeline.on_chunk(attempt, worker, at, has_tokens=has_tokens)
    return timeline


def test_a_reader_sees_waiting_then_prefill_then_decode() -> None:
    """The first piece says that blocks are granted, the first token that the prompt is computed; later ones begin nothing."""
    timeline = seen((1, "w", 5.0, False), (1, "w", 9.0, True), (1, "w", 12.0, True), (1, "w", 13.0, False))
    assert parts(timeline) == [("waiting", "", 0.0), ("prefill", "w", 5.0), ("decode", "w", 9.0)]


def test_in_the_end_the_worker_s_own_times_replace_what_the_reader_saw() -> None:
    """A worker knows what came in one piece, and that it preempted."""
    timeline = seen((1, "w", 50.0, True))
    timeline.finish(Times(before_ms=2, waiting_ms=10, prefill_ms=20, decode_ms=11, preempted_ms=7))
    began = [("waiting", "", 0.0), ("prefill", "w", 12.0)]
    assert parts(timeline) == [*began, ("preempted", "w", 32.0), ("decode", "w", 39.0)]


def test_an_answer_that_moves_has_a_part_for_each_worker() -> None:
    """The gap begins with the last piece of the worker that went away; its own times are lost, what the reader saw is kept."""
    timeline = seen(
        (1, "a", 5.0, False), (1, "a", 9.0, True), (1, "a", 20.0, True), (3, "b", 70.0, False), (3, "b", 80.0, True)
    )
    before = [("waiting", "", 0.0), ("prefill", "a", 5.0), ("decode", "a", 9.0), ("moving", "b", 20.0)]
    assert parts(timeline) == [*before, ("prefill", "b", 70.0), ("decode", "b", 80.0)]
    timeline.finish(Times(before_ms=40, waiting_ms=25, prefill_ms=10, decode_ms=30, preempted_ms=0))
    assert parts(timeline) == [*before, ("waiting", "b", 40.0), ("prefill", "b", 65.0), ("decode", "b", 75.0)]


def test_refused_attempts_before_the_first_piece_are_waiting() -> None:
    """The first piece may be of any attempt."""
    assert parts(seen((4, "d", 5.0, False))) == [("waiting", "", 0.0), ("prefill", "d", 5.0)]

"""How long the worker waits before it calls a manager again that did not answer."""

from __future__ import annotations

from kvpool.worker_service.cache.link_state import BACKOFF_FIRST_SECONDS, BACKOFF_MOST_SECONDS, LinkState


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

"""Leaving: what runs ends, what waits is sent away at once, and nothing new is taken."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from tests.tracer import expected_text
from tests.until import until
from tests.worker_service.world import World, failed, read_right

PROMPT = list(range(20))


def world() -> World:
    """One that runs two requests at a time."""
    return World(num_blocks=200, block_size=4, max_num_seqs=2)


async def test_what_runs_ends_and_what_waits_is_sent_away() -> None:
    async with (subject := world()).running():
        running = [subject.submit([i, *PROMPT], 40) for i in range(2)]
        for request in running:
            await request.stream.get()
        waiting = [subject.submit([i, *PROMPT], 40) for i in range(7, 10)]
        subject.engine.begin_drain()
        for request in waiting:
            assert (await failed(request)).error.kind is ErrorKind.DRAINING
        with pytest.raises(EngineError) as refused:
            subject.submit(PROMPT, 1)
        assert refused.value.kind is ErrorKind.DRAINING
        await asyncio.wait_for(subject.engine.wait_until_empty(), 20)
        for i, request in enumerate(running):
            rest = [token.token_id for token in (await request.stream.get() or pytest.fail("no chunk")).tokens]
            assert rest == expected_text([i, *PROMPT], 40)[-len(rest) :]
            assert request.num_generated == 40


async def test_a_preempted_request_has_begun_and_may_end() -> None:
    """The pool holds one of the two: the younger one waits, half done, when the draining begins."""
    subject = World(num_blocks=14, block_size=4, max_num_seqs=2)
    async with subject.running():
        older, younger = subject.submit([1, *PROMPT], 24), subject.submit([2, *PROMPT], 24)
        await until(lambda: younger.num_preemptions, pause=0)
        assert subject.engine.scheduler.num_waiting == 1
        subject.engine.begin_drain()
        await read_right(older, younger)


async def test_the_heartbeat_tells_the_manager_at_once() -> None:
    async with (subject := world()).running():
        subject.engine.begin_drain()
        subject.link.send_heartbeat()
        await until(lambda: subject.manager.worker("w0").draining, pause=0)

"""What the gateway remembers of its answers, and the parts of their time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.client import Chunk, FinishReason, KvpoolError, Times
from kvpool.gateway.pages.hub import Hub
from kvpool.gateway.pages.request_feed import RequestFeed
from kvpool.gateway.request_log import RequestLog
from kvpool.gateway.timeline import Timeline
from tests.gateway.conftest import Front
from tests.gateway.scripted_pictures import ScriptedPictures
from tests.gateway.serving import calling
from tests.until import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def listed(front: Front, **query: Any) -> Any:
    return (await front.http.get("/api/requests", params=query)).json()


async def last_of(front: Front) -> Any:
    return (await listed(front))["requests"][-1]


async def chat(front: Front, text: str, **options: Any) -> Any:
    return await front.openai.chat.completions.with_raw_response.create(
        model=front.model, messages=[{"role": "user", "content": text}], temperature=0, **options
    )


async def test_an_answer_is_listed_with_its_tokens_and_where_its_time_went(front: Front) -> None:
    """The same numbers as in its usage; the second time its prompt is cached."""
    for _ in range(2):
        answer = await chat(front, "what the log says of an answer", max_tokens=5)
        usage = answer.parse().usage
        found = await last_of(front)
        assert found["request_id"] == answer.headers["x-request-id"]
        assert (found["outcome"], found["reason"], found["model"]) == ("finished", "length", front.model)
        assert found["num_prompt_tokens"] == usage.prompt_tokens
        assert found["num_cached_tokens"] == usage.prompt_tokens_details.cached_tokens
        assert found["num_generated_tokens"] == 5
        states = [part["state"] for part in found["parts"]]
        assert (states[0], states[-1]) == ("waiting", "decode")
        starts = [part["start_ms"] for part in found["parts"]]
        assert starts == sorted(starts)
        assert sum(found["times"].values()) <= found["end_ms"] + 1
        assert starts[-1] <= found["end_ms"] + 1
    assert found["num_cached_tokens"] > 0


async def test_why_it_missed_is_kept_as_it_was_before_it_was_computed(front: Front) -> None:
    """Afterwards its own blocks would be hits."""
    await chat(front, "a prompt that nobody has sent before it is explained", max_tokens=2)
    number = (await last_of(front))["number"]
    found = await listed(front, number=number)
    (worker,) = found["explanation"]["workers"]
    assert worker["num_cached_tokens"] == found["num_cached_tokens"]
    assert worker["miss"]["cause"] == "never_seen"
    assert "never seen" in found["explanation"]["sentences"][0]


async def test_each_answer_to_one_prompt_has_its_own_entry_and_one_explanation(front: Front) -> None:
    answer = await chat(front, "three of them", max_tokens=2, n=3)
    found = [one for one in (await listed(front))["requests"] if one["request_id"] == answer.headers["x-request-id"]]
    assert [one["choice"] for one in found] == [0, 1, 2]
    assert [one["explained"] for one in found] == [True, False, False]


async def test_a_reader_that_leaves_and_a_request_that_fails_are_listed_as_such(front: Front) -> None:
    stream = await front.complete("and then it left", max_tokens=4000, stream=True)
    await anext(aiter(stream))
    assert (await last_of(front))["outcome"] == "running"
    await stream.close()

    async def has_left() -> bool:
        return bool((await last_of(front))["outcome"] == "left")

    await eventually(has_left, "the reader is gone")
    refused = await front.http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1 << 20})
    assert refused.status_code == 400
    found = await last_of(front)
    assert found["outcome"] == "failed"
    assert "max_tokens" in found["reason"]


async def test_as_many_as_were_asked_for_are_kept(front: Front) -> None:
    """And with none of them the manager is not asked why."""
    for most in (0, 2):
        async with calling(f"127.0.0.1:{front.cluster.manager.port}", kept_requests=most) as client:
            for _ in range(4):
                await client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 1})
            found = (await client.get("/api/requests")).json()["requests"]
            assert [one["number"] for one in found] == ([3, 4] if most else [])
            assert all(one["explained"] for one in found)
            missing = await client.get("/api/requests", params={"number": 1})
            assert (missing.status_code, "--kept-requests" in missing.text) == (404, True)


async def next_requests(events: AsyncGenerator[bytes, None]) -> Any:
    while not (event := await anext(events)).startswith(b"event: requests\n"):
        pass
    return json.loads(event.split(b"data: ", 1)[1])


def begin(log: RequestLog) -> Any:
    """The record of an answer whose stream has not begun."""
    stream: Any = SimpleNamespace(model=None, explanation=None, sequence_id_of="s.{}".format)
    return log.begin("r", 0, stream, 0)


async def test_a_browser_gets_all_first_and_then_what_changes() -> None:
    """Changes of half a second come together; what is no longer kept is no longer named."""
    log = RequestLog(1, clock=lambda: 0.0)
    source = ScriptedPictures()
    hub = Hub(source.open, RequestFeed(log, collect_seconds=0.01), retry_seconds=0)
    first = begin(log)
    async with aclosing(hub.events()) as events:
        whole = await next_requests(events)
        assert (whole["whole"], [one["number"] for one in whole["requests"]]) == (True, [1])
        second = begin(log)
        first.close()
        second.close()
        changes = await next_requests(events)
        assert changes["whole"] is False
        assert [(one["number"], one["outcome"]) for one in changes["requests"]] == [(2, "left")]
        assert changes["numbers"] == [2]
    await asyncio.sleep(0)
    assert log.on_change is None, "nobody looks"


async def test_an_answer_ends_once_and_keeps_nothing_of_its_prompt() -> None:
    """The stream holds the prompt, of which there may be megabytes."""
    log = RequestLog(2, clock=lambda: 0.0)
    records = [begin(log) for _ in range(3)]
    records[0].on_error(KvpoolError("no worker", reason="NO_WORKER"))
    records[0].close()
    assert (records[0].as_object()["outcome"], records[0]._stream) == ("failed", None)
    for record in records[1:]:
        record.on_chunk(Chunk(0, (5,), "a", None, None, FinishReason.LENGTH, "w", 1, None))
        record.close()
        assert (record.as_object()["outcome"], record._stream) == ("finished", None)
    assert log.numbers == [2, 3]


def parts(timeline: Timeline) -> list[tuple[str, str, float]]:
    return [(part.state.value, part.worker_id, part.start_ms) for part in timeline.parts]


def seen(*chunks: tuple[int, str, float, bool]) -> Timeline:
    """Attempt, worker and time of each piece, and whether it has tokens."""
    timeline = Timeline()
    for attempt, worker, at, has_tokens in chunks:
        timeline.on_chunk(attempt, worker, at, has_tokens=has_tokens)
    return timeline


async def test_a_reader_sees_waiting_then_prefill_then_decode() -> None:
    """The first piece says that blocks are granted, the first token that the prompt is computed; later ones begin nothing."""
    timeline = seen((1, "w", 5.0, False), (1, "w", 9.0, True), (1, "w", 12.0, True), (1, "w", 13.0, False))
    assert parts(timeline) == [("waiting", "", 0.0), ("prefill", "w", 5.0), ("decode", "w", 9.0)]


async def test_in_the_end_the_worker_s_own_times_replace_what_the_reader_saw() -> None:
    """A worker knows what came in one piece, and that it preempted."""
    timeline = seen((1, "w", 50.0, True))
    timeline.finish(Times(before_ms=2, waiting_ms=10, prefill_ms=20, decode_ms=11, preempted_ms=7))
    began = [("waiting", "", 0.0), ("prefill", "w", 12.0)]
    assert parts(timeline) == [*began, ("preempted", "w", 32.0), ("decode", "w", 39.0)]


async def test_an_answer_that_moves_has_a_part_for_each_worker() -> None:
    """The gap begins with the last piece of the worker that went away; its own times are lost, what the reader saw is kept."""
    timeline = seen(
        (1, "a", 5.0, False), (1, "a", 9.0, True), (1, "a", 20.0, True), (3, "b", 70.0, False), (3, "b", 80.0, True)
    )
    before = [("waiting", "", 0.0), ("prefill", "a", 5.0), ("decode", "a", 9.0), ("moving", "b", 20.0)]
    assert parts(timeline) == [*before, ("prefill", "b", 70.0), ("decode", "b", 80.0)]
    timeline.finish(Times(before_ms=40, waiting_ms=25, prefill_ms=10, decode_ms=30, preempted_ms=0))
    assert parts(timeline) == [*before, ("waiting", "b", 40.0), ("prefill", "b", 65.0), ("decode", "b", 75.0)]


async def test_refused_attempts_before_the_first_piece_are_waiting() -> None:
    """The first piece may be of any attempt."""
    assert parts(seen((4, "d", 5.0, False))) == [("waiting", "", 0.0), ("prefill", "d", 5.0)]

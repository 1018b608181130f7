"""Bodies of requests: what is made of them before they are judged, and what is said of a wrong one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from kvpool.gateway import observation
from kvpool.gateway.errors import ApiError
from kvpool.gateway.openai import bodies
from kvpool.gateway.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from kvpool.gateway.openai.options import completion_options
from kvpool.gateway.page_routes import ExplainBody
from kvpool.gateway.settings import GatewaySettings
from tests.gateway.serving import calling, head

KINDS = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, ExplainBody)


async def refusal(raw: bytes) -> ApiError | None:
    """Why the body of a completion is not taken; None: it is."""

    class Sent:
        async def stream(self) -> AsyncIterator[bytes]:
            for start in range(0, len(raw), 7):
                yield raw[start : start + 7]

    try:
        await read_body(cast(Request, Sent()), CompletionBody)
    except ApiError as error:
        return error
    return None


def num_errors(kind: type[BaseModel], body: dict[str, Any]) -> int:
    """As many as are collected before the first is shown."""
    try:
        kind.model_validate_json(json.dumps(body))
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_list_of_wrong_values_one_error_is_collected(kind: type[BaseModel]) -> None:
    """In each field that any body has, and inside of those; else each value of a long list costs a kilobyte."""
    for name in kind.model_fields:
        for wrong in (None, [None], {"role": "user", "content": [None]}):
            one, many = (num_errors(kind, {name: [wrong] * count}) for count in (1, 60))
            assert many <= one + 1, (name, wrong, "and one of the list's length")
    if "messages" in kind.model_fields:
        one, many = (num_errors(kind, {"messages": [{"role": "u", "content": [1] * count}]}) for count in (1, 60))
        assert one == many


@pytest.mark.parametrize(
    ("raw", "is_taken"),
    [
        (b'{"prompt": [1,2,3,4,5]}', True),
        (b'{"prompt": [1,2,3,4,5,6,7,8,9]}', False),
        (b'{"prompt": [[],[],[],[],[]]}', False),
        (b'{"prompt": "", "x": [{},{},{},{},{}]}', False),
        (b'{"prompt": ",[{,[{,[{,[{,[{,[{,[{,[{"}', True),
        (b'{"prompt": "\\",[{,[{,[{,[{\\\\", "user": ",,,,,,,,,"}', True),
        (b'{"prompt": ["","","","","","","","",""]}', False),
        (b'{"prompt": ["a,b\\"","c","","","","","","",""]}', False),
        (b'{"prompt": "::::::::::::"}', True),
        (b'{"prompt": "", "logit_bias": {"1": 1, "2": 1, "3": 1, "4": 1}}', False),
        (b'{"prompt": "never ends,,,,,,,,,,,,,,,', None),
        (b'{"prompt": "ends with \\', None),
    ],
)
async def test_a_body_with_too_many_values_or_keys_is_refused_before_they_are_made(
    raw: bytes, is_taken: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text has any number of commas and colons. None: what is no JSON is said to be none."""
    monkeypatch.setattr(bodies, "MAX_VALUES", 8)
    monkeypatch.setattr(bodies, "MAX_KEYS", 4)
    monkeypatch.setattr(bodies, "_STRINGS_AT_ONCE", 2)
    found = await refusal(raw)
    assert (None if found is None else found.code) == {
        True: None, False: "request_too_large", None: "invalid_json"
    }[is_taken]  # fmt: skip


async def test_others_are_served_while_a_body_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_VALUES", 1000)
    monkeypatch.setattr(bodies, "_STRINGS_AT_ONCE", 10)
    counting = asyncio.create_task(refusal(b'{"prompt": [' + b'",",' * 900 + b'""]}'))
    turns = 0
    while not counting.done():
        turns += 1
        await asyncio.sleep(0)
    assert counting.result() is None
    assert turns > 90


async def test_an_error_repeats_nothing_long() -> None:
    long = "x" * 100_000
    wrong = {"logit_bias": {long: "wrong"}, "model": long, "stream_options": {long: 1}, long: 1, "early_stopping": long}
    async with calling() as client:
        for field, value in wrong.items():
            answer = await client.post("/v1/completions", json={"prompt": "a", field: value})
            assert answer.status_code == 400
            assert len(answer.content) < 1500


async def test_bodies_that_wait_for_their_answers_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one is always read. What was held is free when its request ends."""
    monkeypatch.setattr(observation, "_SMALL_BODY_BYTES", 100)
    monkeypatch.setattr(observation, "_LARGE_BODIES", 2)
    async with calling(max_body_bytes=1024) as client:

        async def is_refused(content: bytes) -> bool:
            answer = await client.post("/tokenize", content=content)
            if is_full := bool(answer.json()["error"]["code"] == "too_many_bodies"):
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            return is_full

        large, held = b"x" * 1000, []
        for _ in range(2):
            held.append(await asyncio.open_connection("127.0.0.1", client.base_url.port))
            held[-1][1].write(head("POST /tokenize", "Content-Length: 1024") + b" " * 1023)
        async with asyncio.timeout(20):
            while not await is_refused(large):
                pass
            assert not await is_refused(b"{")
            for _, writer in held:
                writer.close()
            while await is_refused(large):
                pass


def test_a_temperature_that_nobody_asks_for_is_left_to_the_model() -> None:
    """OpenAI's is the one of models whose files have none."""
    options = completion_options(CompletionBody(prompt="a"), GatewaySettings())
    assert "temperature" not in options
    assert options["default_temperature"] == 1

"""What kvpool cannot do is refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from kvpool.gateway.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kvpool.gateway.openai.fields import IGNORED_HEADER
from tests.gateway.conftest import Front
from tests.gateway.serving import calling

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "temperature": 0}
COMPLETION_BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 2, "temperature": 0}
BODIES = {CHAT: CHAT_BODY, COMPLETION: COMPLETION_BODY, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}
"""A right one for each path."""


async def refusal(front: Front, path: str, body: Any) -> tuple[int, str | None, str | None]:
    """Status, the field that is named, and the code."""
    answer = await front.http.post(path, json=body)
    error = answer.json()["error"]
    assert error["message"]
    return answer.status_code, error["param"], error["code"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"store": True}, "store"),
        ({"guided_json": {}}, "guided_json"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"made_up": 1}, "made_up"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 500}}, "logit_bias"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 7}, "stop"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stream_options": {"made_up": 1}}, "stream_options"),
        ({"user": "u" * 300}, "user"),
        ({"cache_salt": "s" * 300}, "cache_salt"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"model": "gpt-4"}, "model"),
        ({"n": 2, "num_beams": 2, "temperature": 0.5}, "temperature"),
        ({"n": 2, "length_penalty": 2}, "num_beams"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_field_that_cannot_be_served_is_named(
    front: Front, path: str, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        status, named, _ = await refusal(front, path, BODIES[path] | fields | {"stream": stream})
        assert (status, named) == (404 if param == "model" else 400, param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"content": "no role"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (CHAT, CHAT_BODY | {"max_tokens": 0}, "max_tokens"),
        (CHAT, CHAT_BODY | {"top_logprobs": 2}, "top_logprobs"),
        (COMPLETION, {}, "prompt"),
        (COMPLETION, {"prompt": ""}, "prompt"),
        (COMPLETION, {"prompt": []}, "prompt"),
        (COMPLETION, {"prompt": ["a", ""]}, "prompt"),
        (COMPLETION, {"prompt": [[1], []]}, "prompt"),
        (COMPLETION, {"prompt": [10**6]}, "prompt"),
        (COMPLETION, {"prompt": [-1]}, "prompt"),
        (COMPLETION, COMPLETION_BODY | {"max_tokens": 0}, "max_tokens"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
)
async def test_a_prompt_that_is_none_is_named(front: Front, path: str, body: dict[str, Any], param: str) -> None:
    status, named, _ = await refusal(front, path, body)
    assert (status, named) == (400, param)


async def test_a_prompt_that_is_too_long_exceeds_the_context(front: Front) -> None:
    longest = (await front.http.post("/tokenize", json={"prompt": "a"})).json()["max_model_len"]
    for path, body in (
        (COMPLETION, COMPLETION_BODY | {"prompt": "a" * (longest + 1)}),
        (COMPLETION, COMPLETION_BODY | {"max_tokens": longest}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * longest}]}),
    ):
        status, _, code = await refusal(front, path, body)
        assert (status, code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_fields_without_effect_pass_at_their_defaults(front: Front, path: str) -> None:
    """vllm-router writes some of SGLang's into each body, whatever was asked for; they pass at their default only."""
    passing = {
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "store": False, "response_format": {"type": "text"},
        "service_tier": "auto", "metadata": None, "reasoning_effort": None, "made_up": None, "best_of": None, "suffix": None,
    }  # fmt: skip
    added = {"no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True, "stream_reasoning": True}
    assert (await front.http.post(path, json=BODIES[path] | passing | added)).status_code == 200
    for name, usual in added.items():
        refused = await refusal(front, path, BODIES[path] | {name: not usual})
        assert refused == (400, name, "unsupported_parameter")


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_log_probabilities_of_a_prompt_are_refused_in_a_stream(front: Front, path: str) -> None:
    """Events have no place for them, and clients of vLLM know the refusal. Without a stream they come."""
    body = BODIES[path] | {"prompt_logprobs": 0}
    assert await refusal(front, path, body | {"stream": True}) == (400, "prompt_logprobs", "invalid_value")
    for stream in (False, None):
        answer = await front.http.post(path, json=body | {"stream": stream})
        assert '"prompt_logprobs":[null,' in answer.text


async def test_unknown_fields_are_ignored_only_if_wanted_and_then_listed(front: Front) -> None:
    """At every depth: in options of the stream too."""
    async with calling(f"127.0.0.1:{front.cluster.manager.port}", ignore_unknown_fields=True) as client:
        answer = await client.post(COMPLETION, json=COMPLETION_BODY | {"made_up": 1, "tools": [1], "bad\r\nname": 1})
        assert answer.status_code == 200
        assert "made_up" in answer.headers[IGNORED_HEADER]
        assert "tools" in answer.headers[IGNORED_HEADER]
        nested = {"stream": True, "stream_options": {"include_usage": True, "made_up": 1, "other": None}}
        for path in (CHAT, COMPLETION):
            answer = await client.post(path, json=BODIES[path] | nested)
            assert answer.headers[IGNORED_HEADER] == "stream_options.made_up"
            assert '"completion_tokens":' in answer.text
            assert (await refusal(front, path, BODIES[path] | nested))[2] == "unknown_parameter"


async def test_more_answers_than_allowed_are_429_with_a_time(front: Front) -> None:
    async with calling(f"127.0.0.1:{front.cluster.manager.port}", max_streams=1) as client:
        body = COMPLETION_BODY | {"stream": True, "max_tokens": 4000, "ignore_eos": True}
        async with client.stream("POST", COMPLETION, json=body) as first:
            assert first.status_code == 200
            second = await client.post(COMPLETION, json=COMPLETION_BODY)
            assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        async with asyncio.timeout(20):
            while (await client.post(COMPLETION, json=COMPLETION_BODY)).status_code != 200:
                await asyncio.sleep(0.01)
    await front.cluster.until_idle()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b'{"messages":' + b"[" * 50_000, b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\\ud800", "max_tokens": 1}', b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": [{"role": 7}]}', b'{"messages": [7]}',
        b'{"prompt": "a", "chat_template_kwargs": 7}', b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_request_is_400(front: Front, path: str, body: bytes) -> None:
    answer = await front.http.post(path, content=body)
    assert answer.status_code == 400 or (path == "/tokenize" and answer.status_code == 200), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


ODD: tuple[Any, ...] = (True, -(2**70), "x", [None], {"x": {}})
"""Each kind of value that JSON has."""


@pytest.mark.parametrize(
    ("path", "kind"),
    [(CHAT, ChatBody), (COMPLETION, CompletionBody), ("/tokenize", TokenizeBody), ("/detokenize", DetokenizeBody)],
)
async def test_no_value_of_a_field_makes_the_gateway_fail(front: Front, path: str, kind: type[BaseModel]) -> None:
    """It is taken or refused, in a request that is right otherwise."""
    for name in sorted({*kind.model_fields, "response_format", "tools", "made_up"} - {"n", "stream"}):
        for value in ODD:
            answer = await front.http.post(path, json=BODIES[path] | {name: value})
            assert answer.status_code in (200, 400, 404), (name, value, answer.text)

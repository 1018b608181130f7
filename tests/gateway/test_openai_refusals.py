"""What kvpool cannot do is refused by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from kvpool.gateway.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kvpool.gateway.openai.fields import IGNORED_HEADER
from tests.gateway.conftest import Front
from tests.gateway.serving import http_client, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "temperature": 0}
COMPLETION_BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 2, "temperature": 0}


async def post(front: Front, path: str, body: Any) -> httpx.Response:
    async with http_client(front.gateway.url, timeout=60) as client:
        return await client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))


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
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_field_that_cannot_be_served_is_named(
    front: Front, path: str, fields: dict[str, Any], param: str
) -> None:
    body = (CHAT_BODY if path == CHAT else COMPLETION_BODY) | fields
    for stream in (False, True):
        answer = await post(front, path, body | {"stream": stream})
        assert answer.status_code == (404 if param == "model" else 400), answer.text
        error = answer.json()["error"]
        assert error["param"] == param, error
        assert error["message"]


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
    answer = await post(front, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_a_prompt_that_is_too_long_exceeds_the_context(front: Front) -> None:
    async with http_client(front.gateway.url) as client:
        longest = (await client.post("/tokenize", json={"prompt": "a"})).json()["max_model_len"]
    for path, body in (
        (COMPLETION, COMPLETION_BODY | {"prompt": "a" * (longest + 1)}),
        (COMPLETION, COMPLETION_BODY | {"max_tokens": longest}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * longest}]}),
    ):
        answer = await post(front, path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_defaults_of_fields_without_effect_pass(front: Front) -> None:
    passing = {
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "store": False, "response_format": {"type": "text"},
        "service_tier": "auto", "metadata": None, "reasoning_effort": None, "made_up": None, "best_of": None, "suffix": None,
    }  # fmt: skip
    for path, body in ((CHAT, CHAT_BODY), (COMPLETION, COMPLETION_BODY)):
        assert (await post(front, path, body | passing)).status_code == 200


async def test_what_a_router_adds_to_each_request_passes_at_its_default_only(front: Front) -> None:
    """vllm-router writes these fields of SGLang into each body, whatever was asked for."""
    added = {"no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True, "stream_reasoning": True}
    for path, body in ((CHAT, CHAT_BODY), (COMPLETION, COMPLETION_BODY)):
        assert (await post(front, path, body | added)).status_code == 200
        for name, usual in added.items():
            error = (await post(front, path, body | {name: not usual})).json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_log_probabilities_of_a_prompt_are_refused_in_a_stream(front: Front, path: str) -> None:
    """Events have no place for them, and clients of vLLM know the refusal. Without a stream they come."""
    body = (CHAT_BODY if path == CHAT else COMPLETION_BODY) | {"prompt_logprobs": 0}
    error = (await post(front, path, body | {"stream": True})).json()["error"]
    assert (error["param"], error["code"]) == ("prompt_logprobs", "invalid_value")
    for stream in (False, None):
        assert '"prompt_logprobs":[null,' in (await post(front, path, body | {"stream": stream})).text


async def test_unknown_fields_are_ignored_only_if_wanted_and_then_listed(front: Front) -> None:
    """At every depth: in options of the stream too."""
    address = f"127.0.0.1:{front.cluster.manager.port}"
    async with (
        serving(address, ignore_unknown_fields=True) as gateway,
        http_client(gateway.url) as client,
    ):
        answer = await client.post(COMPLETION, json=COMPLETION_BODY | {"made_up": 1, "tools": [1], "bad\r\nname": 1})
        assert answer.status_code == 200
        assert "made_up" in answer.headers[IGNORED_HEADER]
        assert "tools" in answer.headers[IGNORED_HEADER]
        nested = {"stream": True, "stream_options": {"include_usage": True, "made_up": 1, "other": None}}
        for path, plain in ((CHAT, CHAT_BODY), (COMPLETION, COMPLETION_BODY)):
            answer = await client.post(path, json=plain | nested)
            assert answer.headers[IGNORED_HEADER] == "stream_options.made_up"
            assert '"completion_tokens":' in answer.text
            assert (await post(front, path, plain | nested)).json()["error"]["code"] == "unknown_parameter"


async def test_more_answers_than_allowed_are_429_with_a_time(front: Front) -> None:
    address = f"127.0.0.1:{front.cluster.manager.port}"
    async with serving(address, max_streams=1) as gateway, http_client(gateway.url) as client:
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
    answer = await post(front, path, body)
    assert answer.status_code == 400 or (path == "/tokenize" and answer.status_code == 200), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


BODIES: dict[str, type[BaseModel]] = {
    CHAT: ChatBody,
    COMPLETION: CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
ODD: tuple[Any, ...] = (True, -(2**70), "x", [None], {"x": {}})
"""Each kind of value that JSON has."""


@pytest.mark.parametrize("path", BODIES)
async def test_no_value_of_a_field_makes_the_gateway_fail(front: Front, path: str) -> None:
    """It is taken or refused, in a request that is right otherwise."""
    right = {CHAT: CHAT_BODY, COMPLETION: COMPLETION_BODY, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}
    names = {*BODIES[path].model_fields, "response_format", "tools", "made_up"} - {"n", "stream"}
    async with http_client(front.gateway.url, timeout=60) as client:
        for name in sorted(names):
            for value in ODD:
                answer = await client.post(path, content=json.dumps(right[path] | {name: value}))
                assert answer.status_code in (200, 400, 404), (name, value, answer.text)

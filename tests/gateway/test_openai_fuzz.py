"""No body makes the gateway fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.test_openai_refusals import CHAT, CHAT_BODY, COMPLETION, COMPLETION_BODY

pytestmark = pytest.mark.slow

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "max_tokens", "logprobs",
        "top_logprobs", "logit_bias", "stream", "stream_options", "echo", "user", "cache_salt", "priority", "min_tokens",
        "ignore_eos", "stop_token_ids", "prompt_logprobs", "chat_template_kwargs", "return_token_ids", "tools", "suffix",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "max_completion_tokens", "response_format",
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def http(front_url: str) -> Iterator[httpx.Client]:
    """One for all bodies: each would read the certificates of all authorities, which takes longer than an answer."""
    with httpx.Client(base_url=front_url, timeout=60) as client:
        yield client


@given(
    path=st.sampled_from([CHAT, COMPLETION, "/tokenize", "/detokenize"]),
    fields=st.dictionaries(NAMES | st.text(max_size=6), JSON, max_size=4),
    keeps=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_fuzzed_body_never_makes_the_gateway_fail(http: httpx.Client, path: str, fields: Any, keeps: bool) -> None:
    """With a prompt that is right, or whatever comes."""
    body = ({**CHAT_BODY, **COMPLETION_BODY} if keeps else {}) | fields
    if path == CHAT and keeps:
        body.pop("prompt", None)
    if path == COMPLETION and keeps:
        body.pop("messages", None)
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code in (200, 400, 404), answer.text

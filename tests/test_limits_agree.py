"""What the client lets a request ask for is what the worker takes: each has a copy of the limits, and may not import the other."""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import pytest

from kvpool.client import InvalidRequest, options, sampling
from kvpool.client.options import GenerateOptions, GenerateSettings
from kvpool.v1 import worker_pb2
from kvpool.worker_service import codec, sampling_codec
from kvpool.worker_service.codec import decode_generate
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.prompt import PromptEncoder

PROMPTS = PromptEncoder(None, 1000)

WORKERS_ALONE = {"MAX_ID_BYTES", "MAX_PROMPT_LOGPROBS"}
"""Of the name that the client makes up itself, and of the worker's own messages."""


def limits(*modules: ModuleType) -> dict[str, float]:
    found = [{name: value for name, value in vars(module).items() if name.startswith("MAX_")} for module in modules]
    both: dict[str, float] = {}
    for of_module in found:
        assert not both.keys() & of_module.keys()
        both |= of_module
    return both


def test_every_limit_stands_on_both_sides_with_one_value() -> None:
    ours = limits(sampling_codec, codec)
    theirs = limits(sampling, options)
    assert len(theirs) >= 10
    assert theirs == {name: value for name, value in ours.items() if name not in WORKERS_ALONE}
    assert ours.keys() >= WORKERS_ALONE


def request(**asked: Any) -> worker_pb2.GenerateRequest:
    """As the client sends it. Raises InvalidRequest where it refuses."""
    settings = GenerateSettings.from_options(cast(GenerateOptions, asked))
    return settings.request(token_ids=[1, 2], num_delivered=0, sequence_id="s", attempt=1, model_fingerprint="fp")


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_k": 2**32 - 1},
        {"top_p": 1.0},
        {"top_p": 1e-30},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 10.0},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {token: (-1) ** token * 100.0 for token in range(1024)}},
        {"seed": 2**64 - 1},
        {"logprobs": 20, "prompt_logprobs": 20},
        {"stop": ["x" * 256] * 16},
        {"stop_token_ids": range(256)},
        {"tenant_salt": "x" * 256, "tenant": "y" * 256},
        {"priority": -(2**31)},
        {"priority": 2**31 - 1},
    ],
)
def test_the_worker_takes_the_furthest_that_the_client_sends(asked: dict[str, Any]) -> None:
    decode_generate(request(**asked), PROMPTS, "fp")


BEYOND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 100.5}, {"sampling": {"temperature": 100.5}}),
    "temperature below 0": ({"temperature": -0.5}, {"sampling": {"temperature": -0.5}}),
    "top_p": ({"top_p": 1.5}, {"sampling": {"top_p": 1.5}}),
    "top_p of nothing": ({"top_p": 0.0}, {"sampling": {"top_p": 0.0}}),
    "min_p": ({"min_p": 1.5}, {"sampling": {"min_p": 1.5}}),
    "repetition_penalty": ({"repetition_penalty": 10.5}, {"sampling": {"repetition_penalty": 10.5}}),
    "repetition_penalty of 0": ({"repetition_penalty": 0.0}, {"sampling": {"repetition_penalty": 0.0}}),
    "presence_penalty": ({"presence_penalty": 2.5}, {"sampling": {"presence_penalty": 2.5}}),
    "frequency_penalty": ({"frequency_penalty": -2.5}, {"sampling": {"frequency_penalty": -2.5}}),
    "logit_bias": ({"logit_bias": {1: 100.5}}, {"sampling": {"logit_bias": {1: 100.5}}}),
    "logit_biases": (
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}},
    ),
    "logprobs": ({"logprobs": 21}, {"logprobs": 21}),
    "prompt_logprobs": ({"prompt_logprobs": 21}, {"prompt_logprobs": 21}),
    "stop strings": ({"stop": ["x"] * 17}, {"stop": {"stop_strings": ["x"] * 17}}),
    "a long stop string": ({"stop": "x" * 257}, {"stop": {"stop_strings": ["x" * 257]}}),
    "an empty stop string": ({"stop": ""}, {"stop": {"stop_strings": [""]}}),
    "stop_token_ids": ({"stop_token_ids": range(257)}, {"stop": {"stop_token_ids": range(257)}}),
    "tenant_salt": ({"tenant_salt": "x" * 257}, {"tenant_salt": "x" * 257}),
    "tenant": ({"tenant": "x" * 257}, {"tenant": "x" * 257}),
}


@pytest.mark.parametrize(("asked", "fields"), BEYOND.values(), ids=BEYOND.keys())
def test_beyond_the_limits_both_refuse(asked: dict[str, Any], fields: dict[str, Any]) -> None:
    """The worker of those who do not use this client."""
    with pytest.raises(InvalidRequest):
        request(**asked)
    sent = request()
    sent.MergeFrom(worker_pb2.GenerateRequest(**fields))
    with pytest.raises(EngineError) as caught:
        decode_generate(sent, PROMPTS, "fp")
    assert caught.value.kind is ErrorKind.INVALID

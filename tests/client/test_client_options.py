"""Options are checked before anybody is asked, and reach the worker as they were given."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvpool.client import ClientConfig, GenerateOptions, InvalidRequest, Model
from kvpool.client.prompt import Prompt
from kvpool.client.request import attempt_request, build_request, request_for
from kvpool.v1 import worker_pb2
from kvpool.worker_service.codec import check_generate, decode_generate
from kvpool.worker_service.engine.prompt import PromptEncoder


def attempt(options: GenerateOptions, *token_ids: int, num_delivered: int = 0) -> worker_pb2.GenerateRequest:
    """The third attempt at these options."""
    return attempt_request(
        build_request(options),
        token_ids=token_ids,
        num_delivered=num_delivered,
        sequence_id="s",
        attempt=3,
        model_fingerprint="f",
    )


WRONG: dict[str, list[object]] = {
    "max_token": [5],
    "max_tokens": [0],
    "min_tokens": [-1, 8],
    "temperature": [-0.1, float("nan"), "hot"],
    "top_k": [-1, 2.5],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "logit_bias": [{-1: 0.0}, {1: 100.5}, dict.fromkeys(range(1025), 1.0), {"the": 1.0}, [7]],
    "seed": [-1, 2**64],
    "stop": ["", "ü" * 129, [7]],
    "stop_token_ids": [[-1], [1] * 257, 7],
    "logprobs": [21],
    "timeout": [0, "soon"],
    "adapter": ["x" * 257],
    "tenant": ["x" * 257, b"\xff"],
    "priority": [2**31],
    "echo": ["yes"],
}


@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_option_is_named(option: str) -> None:
    """Both sides have one check of the limits; tests/cluster/test_requests_that_end_early.py has a case for each of them."""
    for value in WRONG[option]:
        with pytest.raises(InvalidRequest, match=option):
            build_request(cast(GenerateOptions, {"max_tokens": 7, option: value}))


def test_options_reach_the_message() -> None:
    sampling: GenerateOptions = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 2**64 - 1, "repetition_penalty": 1.5,
        "presence_penalty": -0.5, "frequency_penalty": 0.75, "logit_bias": {7: -100.0, 0: 0.5},
    }  # fmt: skip
    stop: GenerateOptions = {"max_tokens": 7, "min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True}
    shown: GenerateOptions = {"logprobs": 0, "prompt_logprobs": 3, "echo": True}
    names: GenerateOptions = {"tenant": "acme", "tenant_salt": "salt", "adapter": "lora", "priority": -7}
    assert attempt(
        {**sampling, **stop, **shown, **names, "stop": ["a", "b"], "timeout": 9, "model": "m"}, 1, 2
    ) == worker_pb2.GenerateRequest(
        sequence_id="s",
        attempt=3,
        model_fingerprint="f",
        token_ids=worker_pb2.TokenIds(ids=[1, 2]),
        sampling=worker_pb2.SamplingParams(**cast(Any, sampling)),
        stop=worker_pb2.StopConditions(**cast(Any, stop), stop_strings=["a", "b"]),
        **cast(Any, shown),
        **cast(Any, names),
    )


LEAST: GenerateOptions = {
    "temperature": 0.0, "top_p": 1e-30, "min_p": 0.0, "repetition_penalty": 1e-30, "presence_penalty": -2.0,
    "frequency_penalty": -2.0, "priority": -(2**31),
}  # fmt: skip
MOST: GenerateOptions = {
    "temperature": 100.0, "top_k": 2**32 - 1, "top_p": 1.0, "min_p": 1.0, "repetition_penalty": 10.0, "presence_penalty": 2.0,
    "frequency_penalty": 2.0, "logit_bias": {token: (-1) ** token * 100.0 for token in range(1024)}, "seed": 2**64 - 1,
    "logprobs": 20, "prompt_logprobs": 20, "stop": ["x" * 256] * 16, "stop_token_ids": range(256), "tenant_salt": "x" * 256,
    "tenant": "y" * 256, "priority": 2**31 - 1,
}  # fmt: skip


@pytest.mark.parametrize("asked", [LEAST, MOST], ids=["least", "most"])
def test_the_worker_takes_all_that_the_client_sends(asked: GenerateOptions) -> None:
    """The limits themselves, and what is left of them in the floats of the wire."""
    prompts = PromptEncoder(None, 1000)
    request = attempt(asked, 1, 2)
    check_generate(request, prompts, "f")
    decode_generate(request, prompts)


def test_none_is_the_default() -> None:
    """Of every option, so that a caller may pass on what it was not given."""
    assert build_request(cast(GenerateOptions, dict.fromkeys(GenerateOptions.__annotations__))) == build_request({})


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert build_request({"stop": "end"}).stop.stop_strings == ["end"]


def test_sampling_without_a_seed_gets_a_random_one() -> None:
    """Chosen by the client, so that another attempt draws the same tokens; greedy needs none."""
    seeds = {build_request({"temperature": 1.0}).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert max(seeds) > 2**48
    assert build_request({}).sampling.seed == 0
    assert build_request({"temperature": 1.0, "seed": 0}).sampling.seed == 0


@pytest.mark.parametrize(
    ("asked", "of_the_model", "expected"), [(None, None, 1.0), (None, 1.5, 1.5), (0, 1.5, 0.0), (0, None, 0.0)]
)
def test_the_temperature_is_the_requests_then_the_models_then_the_callers(
    asked: float | None, of_the_model: float | None, expected: float
) -> None:
    """The default of a caller, which OpenAI's API has, is of no weight where the model's files have one."""
    defaults = worker_pb2.GenerationDefaults(sampling=worker_pb2.SamplingParams(temperature=of_the_model))
    model = Model("m", "f", "llama", "float32", 99, 64, (), None, None, defaults=defaults)
    options: GenerateOptions = {} if asked is None else {"temperature": asked}
    request = request_for(build_request(options), model, Prompt([1]), default_temperature=1.0)
    assert request.sampling.temperature == expected
    assert request.sampling.HasField("seed") == (expected > 0)


def test_the_environment_names_the_manager() -> None:
    assert ClientConfig.from_environment({}).manager == "127.0.0.1:50051"
    assert ClientConfig.from_environment({"KVPOOL_MANAGER": "localhost:1"}).manager == "localhost:1"


@pytest.mark.parametrize("address", ["", "localhost", ":50051", "localhost:0", "localhost:70000", "localhost:port"])
def test_a_manager_that_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="host:port"):
        ClientConfig(manager=address)

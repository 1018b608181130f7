"""Options are checked before anybody is asked, and reach the worker as they were given."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvpool.client import ClientConfig, GenerateOptions, InvalidRequest
from kvpool.client.options import GenerateSettings


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": 100.5},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 10.1},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.1},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {2**32: 0.0}},
        {"logit_bias": {1: 100.5}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"min_tokens": -1},
        {"min_tokens": 8, "max_tokens": 7},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": ["x"] * 17},
        {"stop": ""},
        {"stop": "ü" * 129},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1] * 257},
        {"logprobs": 21},
        {"logprobs": -1},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": -1},
        {"timeout": 0},
        {"adapter": "x" * 257},
        {"tenant_salt": "x" * 257},
        {"priority": 2**31},
        {"priority": -(2**31) - 1},
        {"tenant": "x" * 257},
        {"max_token": 5},
    ],
)
def test_a_wrong_option_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        GenerateSettings.from_options(cast(GenerateOptions, wrong))


def test_options_reach_the_message() -> None:
    settings = GenerateSettings.from_options(
        GenerateOptions(
            max_tokens=7,
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.75,
            logit_bias={7: -100.0, 0: 0.5},
            seed=2**64 - 1,
            stop=["a", "b"],
            stop_token_ids=[9],
            ignore_eos=True,
            min_tokens=2,
            logprobs=0,
            prompt_logprobs=3,
            echo=True,
            priority=-7,
            tenant="acme",
        )
    )
    request = settings.request(token_ids=[1, 2], num_delivered=0, sequence_id="s", attempt=3, model_fingerprint="f")
    assert (request.sequence_id, request.attempt, request.model_fingerprint) == ("s", 3, "f")
    assert list(request.token_ids.ids) == [1, 2]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.5, 3, 0.25)
    assert (request.sampling.min_p, request.sampling.repetition_penalty) == (0.125, 1.5)
    assert (request.sampling.presence_penalty, request.sampling.frequency_penalty) == (-0.5, 0.75)
    assert dict(request.sampling.logit_bias) == {7: -100.0, 0: 0.5}
    assert request.sampling.seed == 2**64 - 1
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.ignore_eos) == (7, 2, True)
    assert (request.prompt_logprobs, request.echo) == (3, True)
    assert (list(request.stop.stop_strings), list(request.stop.stop_token_ids)) == (["a", "b"], [9])
    assert (request.priority, request.tenant) == (-7, "acme")
    assert request.HasField("logprobs")
    assert request.logprobs == 0


@pytest.mark.parametrize(("max_tokens", "left"), [(7, 4), (None, 0)])
def test_a_continuation_asks_for_what_is_left(max_tokens: int | None, left: int) -> None:
    """0 on the wire is "as many as fit", before the move and behind it."""
    settings = GenerateSettings.from_options({"max_tokens": max_tokens})
    request = settings.request(
        token_ids=[1, 2, 5, 6, 7], num_delivered=3, sequence_id="s", attempt=2, model_fingerprint="f"
    )
    assert (request.stop.max_tokens, request.num_delivered_tokens) == (left, 3)
    assert list(request.token_ids.ids) == [1, 2, 5, 6, 7]


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert GenerateSettings.from_options({"stop": "end"}).stop_strings == ("end",)


def test_sampling_without_a_seed_gets_a_random_one() -> None:
    """Chosen by the client, so that another attempt draws the same tokens; greedy needs none."""
    seeds = {GenerateSettings.from_options({"temperature": 1.0}).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert max(seeds) > 2**48
    assert GenerateSettings.from_options({}).sampling.seed == 0
    assert GenerateSettings.from_options({"temperature": 1.0, "seed": 0}).sampling.seed == 0


def test_the_environment_names_the_manager() -> None:
    assert ClientConfig.from_environment({}).manager == "127.0.0.1:50051"
    assert ClientConfig.from_environment({"KVPOOL_MANAGER": "localhost:1"}).manager == "localhost:1"


@pytest.mark.parametrize("address", ["", "localhost", ":50051", "localhost:0", "localhost:70000", "localhost:port"])
def test_a_manager_that_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="host:port"):
        ClientConfig(manager=address)

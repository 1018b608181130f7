"""What a request means that leaves fields unset."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.protocol.defaults import fill_in
from kvpool.v1 import worker_pb2

IDS = worker_pb2.TokenIds
DEFAULTS = worker_pb2.GenerationDefaults(
    sampling=worker_pb2.SamplingParams(
        temperature=0.5, top_k=9, top_p=0.5, min_p=0.25, repetition_penalty=2, no_repeat_ngram_size=3,
        encoder_no_repeat_ngram_size=2, suppress_tokens=IDS(ids=[1, 2]), begin_suppress_tokens=IDS(ids=[3]),
        bad_words_ids=worker_pb2.TokenIdLists(lists=[IDS(ids=[4, 5])]), forced_eos_token_id=IDS(ids=[6]),
    ),
    stop=worker_pb2.StopConditions(max_tokens=20, min_tokens=5, stop_strings=["end"]),
)  # fmt: skip
BEAMS = worker_pb2.BeamSearch(num_beams=3, length_penalty=2, early_stopping=worker_pb2.EARLY_STOPPING_FULL)


def filled(
    request: worker_pb2.GenerateRequest, defaults: worker_pb2.GenerationDefaults = DEFAULTS
) -> worker_pb2.GenerateRequest:
    fill_in(request, defaults, num_first=10, max_model_len=100)
    return request


def test_a_request_that_says_nothing_means_the_defaults_and_filling_in_again_changes_nothing() -> None:
    request = filled(worker_pb2.GenerateRequest())
    assert (request.sampling, request.stop) == (DEFAULTS.sampling, DEFAULTS.stop)
    again = worker_pb2.GenerateRequest()
    again.CopyFrom(request)
    others = worker_pb2.GenerationDefaults(beam_search=BEAMS, max_length=50, min_length=40)
    others.sampling.top_k = 1
    assert filled(again, others) == request, "another worker's file does not change it"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0), ("repetition_penalty", 1), ("no_repeat_ngram_size", 0),
        ("encoder_no_repeat_ngram_size", 0), ("suppress_tokens", IDS()), ("begin_suppress_tokens", IDS(ids=[7])),
        ("bad_words_ids", worker_pb2.TokenIdLists()), ("forced_eos_token_id", IDS()),
    ],
)  # fmt: skip
def test_each_option_overrides_its_own_default_alone(field: str, value: Any) -> None:
    asked = worker_pb2.SamplingParams(**{field: value})
    request = filled(worker_pb2.GenerateRequest(sampling=asked))
    assert getattr(request.sampling, field) == value
    rest = worker_pb2.SamplingParams()
    rest.CopyFrom(DEFAULTS.sampling)
    for one in (request.sampling, rest):
        one.ClearField(field)
    assert request.sampling == rest


@pytest.mark.parametrize(
    ("asked", "defaults", "expected"),
    [
        ({}, {"stop": {"max_tokens": 20}}, (20, 0)),
        ({"max_tokens": 0}, {"stop": {"max_tokens": 20}}, (0, 0)),
        ({}, {"stop": {"max_tokens": 90}}, (0, 0)),  # no room for it
        ({}, {"max_length": 15}, (5, 0)),
        ({}, {"max_length": 10}, (0, 0)),  # the prompt is as long
        ({}, {"max_length": 15, "stop": {"max_tokens": 20}}, (20, 0)),
        ({}, {"min_length": 15}, (0, 5)),
        ({}, {"min_length": 15, "stop": {"min_tokens": 0}}, (0, 0)),
        ({"max_tokens": 3}, {"min_length": 15}, (3, 3)),
        ({"min_tokens": 0}, {"min_length": 15}, (0, 0)),
        ({"max_tokens": 3, "num_delivered": 4}, {"stop": {"min_tokens": 9}}, (3, 7)),
        ({"num_delivered": 4}, {"stop": {"max_tokens": 20}}, (16, 0)),
        ({"num_delivered": 30}, {"stop": {"max_tokens": 20}}, (1, 0)),
    ],
)
def test_lengths_count_from_the_prompt_and_never_ask_for_too_much(
    asked: dict[str, int], defaults: dict[str, Any], expected: tuple[int, int]
) -> None:
    request = worker_pb2.GenerateRequest(num_delivered_tokens=asked.get("num_delivered", 0))
    for name in ("max_tokens", "min_tokens"):
        if name in asked:
            setattr(request.stop, name, asked[name])
    filled(request, worker_pb2.GenerationDefaults(**defaults))
    assert (request.stop.max_tokens, request.stop.min_tokens) == expected


@pytest.mark.parametrize(
    ("asked", "num_beams"),
    [
        ({}, 3), ({"n": 3}, 3), ({"n": 4}, 0), ({"sampling": {"temperature": 0.5}}, 0), ({"sampling": {"temperature": 0}}, 3),
        ({"beam_search": {"num_beams": 1}}, 1), ({"beam_search": {"num_beams": 2}}, 2), ({"num_delivered_tokens": 1}, 0),
    ],
)  # fmt: skip
def test_beams_by_default_are_for_requests_that_could_ask_for_them(asked: dict[str, Any], num_beams: int) -> None:
    defaults = worker_pb2.GenerationDefaults(beam_search=BEAMS)
    request = filled(worker_pb2.GenerateRequest(**asked), defaults)
    assert request.beam_search.num_beams == num_beams
    expected = BEAMS if num_beams > 1 else worker_pb2.BeamSearch()
    assert request.beam_search.length_penalty == expected.length_penalty
    assert request.beam_search.early_stopping == expected.early_stopping


def test_what_a_search_says_itself_counts() -> None:
    own = worker_pb2.BeamSearch(num_beams=2, length_penalty=0, early_stopping=worker_pb2.EARLY_STOPPING_UNSPECIFIED)
    request = worker_pb2.GenerateRequest(beam_search=own)
    defaults = worker_pb2.GenerationDefaults(beam_search=BEAMS, sampling=DEFAULTS.sampling)
    assert filled(request, defaults).beam_search == own
    assert request.sampling.temperature == 0, "beams are not drawn"

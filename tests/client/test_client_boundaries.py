"""Where chats with one system prompt part: the client knows it from the template, and tells workers to whom it matters."""

from __future__ import annotations

from typing import Any, Unpack

import pytest

from kvpool.client.errors import InvalidRequest
from kvpool.client.model import Model
from kvpool.client.options import GenerateOptions
from kvpool.client.request import attempt_request, build_request
from kvpool.v1 import worker_pb2
from tests.client import words

TEMPLATE = (
    "{% for message in messages %}[ {{ message.role }} : {{ message.content }} ] {% endfor %}"
    "{% if add_generation_prompt %}[ assistant : {% endif %}"
)
NEEDS_USER = "{% if messages[-1].role != 'user' %}{{ raise_exception('nobody asks') }}{% endif %}" + TEMPLATE
SYSTEM = {"role": "system", "content": "be brief and kind"}
DEVELOPER = {"role": "developer", "content": "be brief"}
USER = {"role": "user", "content": "why is the sky blue"}
SAID = "[ ] : system user assistant developer be brief and kind why is the sky blue"
WORDS = (*words.WORDS[:5], *SAID.split())


def model(template: str = TEMPLATE, *, keeps_boundaries: bool = True) -> Model:
    facts = worker_pb2.ModelFacts(
        model_name="m", vocab_size=len(WORDS), max_model_len=100, keeps_boundaries=keeps_boundaries
    )
    return Model.from_parts(facts, words.text_files(template, WORDS))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, USER], ["[ system : be brief and kind ]"]),
        ([SYSTEM, DEVELOPER, USER], ["[ system : be brief and kind ] [ developer : be brief ]"]),
        ([USER], []),
        ([SYSTEM], []),
        ([USER, SYSTEM, USER], []),
    ],
    ids=["system", "developer", "none", "nothing else", "later"],
)
def test_a_chat_has_a_boundary_at_the_end_of_its_system_prompt(messages: list[Any], expected: list[str]) -> None:
    prompt = model().chat_prompt(messages)
    assert prompt.token_ids == model().encode_chat(messages)
    assert [prompt.token_ids[:length] for length in prompt.boundaries] == [
        [WORDS.index(word) for word in beginning.split()] for beginning in expected
    ]


def test_a_template_that_wants_a_user_to_speak_is_no_error() -> None:
    prompt = model(NEEDS_USER).chat_prompt([SYSTEM, USER])
    assert (prompt.boundaries, len(prompt.token_ids) > 0) == ((), True)


def test_nothing_is_rendered_twice_for_a_model_that_keeps_everything() -> None:
    assert model(keeps_boundaries=False).chat_prompt([SYSTEM, USER]).boundaries == ()


def test_the_boundaries_of_a_request_go_before_those_of_its_prompt() -> None:
    def sent(**options: Unpack[GenerateOptions]) -> list[int]:
        request = attempt_request(
            build_request(options),
            token_ids=[1, 2, 3],
            boundaries=(2,),
            num_delivered=0,
            sequence_id="s",
            attempt=1,
            model_fingerprint="f",
        )
        return list(request.boundaries)

    assert sent() == [2]
    assert sent(boundaries=[1, 3]) == [1, 3]


def test_more_boundaries_than_a_worker_takes_are_refused_before_they_are_sent() -> None:
    with pytest.raises(InvalidRequest, match="boundaries must be at most 8 lengths; got 9"):
        build_request({"boundaries": range(1, 10)})

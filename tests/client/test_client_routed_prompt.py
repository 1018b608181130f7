"""What a client makes of a prompt for models that have an encoder, or keep boundaries: what it sends, and what it refuses."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Unpack

import pytest

from kvpool.client.errors import InvalidRequest
from kvpool.client.explanation import Explanation
from kvpool.client.model import Model
from kvpool.client.options import GenerateOptions
from kvpool.client.prompt import EncoderModel, routed_prompt
from kvpool.client.request import attempt_request, build_request
from kvpool.v1 import cache_pb2, common_pb2, worker_pb2
from tests.client import words

ROOT = common_pb2.Root(model_fingerprint="f", adapter="a", tenant_salt="s")
ENCODER = EncoderModel(max_tokens=4, decoder_prompt=(2, 9))


def facts(**fields: Any) -> worker_pb2.ModelFacts:
    return worker_pb2.ModelFacts(
        model_name="tiny", model_fingerprint="f", vocab_size=10, max_model_len=16, max_encoder_tokens=4, **fields
    )


def model(**fields: Any) -> Model:
    return Model.from_parts(facts(is_encoder_decoder=True, decoder_start_token_id=2, **fields), {})


def test_without_an_encoder_the_prompt_and_what_was_delivered_are_the_text() -> None:
    assert EncoderModel.of(facts()) is None
    assert routed_prompt(ROOT, None, [5, 6], [7]) == (ROOT, [5, 6, 7], 0)


def test_with_one_the_prompt_is_named_by_its_digest_and_the_text_begins_with_the_models_tokens() -> None:
    root, token_ids, num_encoder_tokens = routed_prompt(ROOT, ENCODER, [5, 6], [7])
    assert (token_ids, num_encoder_tokens) == ([2, 9, 7], 2)
    assert root.input_digest == sha256(b"\5\0\0\0\6\0\0\0").digest()
    assert (root.model_fingerprint, root.adapter, root.tenant_salt) == ("f", "a", "s")
    assert not ROOT.input_digest, "the caller's root is as it was"


@pytest.mark.parametrize(("fields", "expected"), [({}, (2,)), ({"forced_bos_token_id": 0}, (2, 0))])
def test_a_forced_first_token_is_part_of_what_every_text_begins_with(
    fields: dict[str, int], expected: tuple[int, ...]
) -> None:
    encoder = model(**fields).encoder
    assert encoder is not None
    assert encoder.decoder_prompt == expected


def test_an_answer_shares_its_room_with_what_the_text_begins_with() -> None:
    assert model().num_first_tokens(7) == 1
    assert model(forced_bos_token_id=0).num_first_tokens(7) == 2
    assert Model.from_parts(facts(), {}).num_first_tokens(7) == 7


def test_a_prompt_may_be_as_long_as_the_encoder_takes_and_have_its_ids() -> None:
    assert model().encode_prompt([1, 99, 3, 4]) == [1, 99, 3, 4], "its worker knows the encoder's vocabulary"
    for wrong, why in (([1] * 5, "takes 4"), ([], "is empty"), ([-1], "outside"), ([1 << 32], "outside")):
        with pytest.raises(InvalidRequest, match=why):
            model().encode_prompt(wrong)


def test_it_does_not_chat() -> None:
    with pytest.raises(InvalidRequest, match="does not chat"):
        model().encode_chat([{"role": "user", "content": "Hello"}])


def test_an_explanation_says_who_has_the_encoders_output() -> None:
    workers = [
        cache_pb2.WorkerExplanation(
            worker_id=name, miss=cache_pb2.Miss(cause=cache_pb2.MISS_CAUSE_PARTIAL_TAIL), encoder_cached=name == "a"
        )
        for name in ("a", "b")
    ]
    response = cache_pb2.ExplainResponse(workers=workers, num_workers=2)
    explanation = Explanation.from_proto(response, routed_prompt(ROOT, ENCODER, [5, 6, 7]))
    first, second = explanation.sentences()
    assert first.startswith(
        "a has the encoder's output for the 3 tokens of the prompt; of the decoder's text it would serve 0 of 2"
    )
    assert second.startswith("b does not have the encoder's output")
    shown = explanation.as_object()
    assert (shown["num_encoder_tokens"], [one["encoder_cached"] for one in shown["workers"]]) == (3, [True, False])


# -- where chats with one system prompt part: the client knows it from the template, and tells workers to whom it matters

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


def chat_model(template: str = TEMPLATE, *, keeps_boundaries: bool = True) -> Model:
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
    prompt = chat_model().chat_prompt(messages)
    assert prompt.token_ids == chat_model().encode_chat(messages)
    assert [prompt.token_ids[:length] for length in prompt.boundaries] == [
        [WORDS.index(word) for word in beginning.split()] for beginning in expected
    ]


def test_a_template_that_wants_a_user_to_speak_is_no_error() -> None:
    prompt = chat_model(NEEDS_USER).chat_prompt([SYSTEM, USER])
    assert (prompt.boundaries, len(prompt.token_ids) > 0) == ((), True)


def test_nothing_is_rendered_twice_for_a_model_that_keeps_everything() -> None:
    assert chat_model(keeps_boundaries=False).chat_prompt([SYSTEM, USER]).boundaries == ()


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

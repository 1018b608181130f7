"""What a client tells the manager of a prompt, and what it refuses by itself, for models whose prompt feeds an encoder."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from kvpool.client.errors import InvalidRequest
from kvpool.client.explanation import Explanation
from kvpool.client.model import Model
from kvpool.client.prompt import EncoderModel, routed_prompt
from kvpool.v1 import cache_pb2, common_pb2, worker_pb2

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

"""A request that says how much of its prompt was delivered before: only what can be true is taken."""

from __future__ import annotations

import pytest

from kvpool.v1 import worker_pb2
from kvpool.worker_service.codec import decode_generate
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.prompt import PromptEncoder

PROMPTS = PromptEncoder(None, 1000)


def request(num_delivered: int, *token_ids: int) -> worker_pb2.GenerateRequest:
    return worker_pb2.GenerateRequest(
        sequence_id="s",
        attempt=2,
        token_ids=worker_pb2.TokenIds(ids=token_ids),
        num_delivered_tokens=num_delivered,
    )


def test_the_delivered_tokens_stay_part_of_the_prompt() -> None:
    params = decode_generate(request(2, 7, 8, 9), PROMPTS)
    assert (params.token_ids, params.num_delivered_tokens) == ([7, 8, 9], 2)


@pytest.mark.parametrize("num_delivered", [3, 4, 2**32 - 1])
def test_a_prompt_of_delivered_tokens_alone_is_refused(num_delivered: int) -> None:
    with pytest.raises(EngineError, match="less than the 3 tokens of the prompt") as caught:
        decode_generate(request(num_delivered, 7, 8, 9), PROMPTS)
    assert (caught.value.kind, caught.value.field) == (ErrorKind.INVALID, "num_delivered_tokens")


def test_delivered_tokens_cannot_be_counted_in_a_text() -> None:
    asked = worker_pb2.GenerateRequest(sequence_id="s", attempt=2, text="abc", num_delivered_tokens=1)
    with pytest.raises(EngineError, match="token_ids") as caught:
        decode_generate(asked, PROMPTS)
    assert caught.value.kind is ErrorKind.INVALID

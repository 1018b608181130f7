"""Requests and answers on the wire: every field arrives, delivered tokens can be true, and long log-probabilities fit."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.v1 import worker_pb2
from kvpool.worker_service.codec import MAX_PROMPT_LOGPROBS, decode_generate, encode_chunk
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.prompt import PromptEncoder
from kvpool.worker_service.engine.stream import EndReason, StreamChunk
from kvpool.worker_service.step import RowLogprobs, SampledToken, SamplingParams

PROMPTS = PromptEncoder(None, 1000)


def request() -> worker_pb2.GenerateRequest:
    return worker_pb2.GenerateRequest(sequence_id="s", attempt=1, token_ids=worker_pb2.TokenIds(ids=[1, 2, 3]))


def ids(*token_ids: int) -> worker_pb2.TokenIds:
    return worker_pb2.TokenIds(ids=token_ids)


def test_nothing_said_is_greedy_and_changes_no_logit() -> None:
    params = decode_generate(request(), PROMPTS)
    assert params.sampling == SamplingParams()
    assert not params.sampling.has_penalties
    assert (params.min_tokens, params.num_prompt_logprobs, params.echo) == (0, None, False)


def test_every_field_arrives() -> None:
    asked = request()
    numbers: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 2**64 - 1, "repetition_penalty": 1.5,
        "presence_penalty": -0.5, "frequency_penalty": 0.75, "logit_bias": {7: -100.0, 0: 0.5}, "no_repeat_ngram_size": 2,
        "encoder_no_repeat_ngram_size": 3,
    }  # fmt: skip
    words = worker_pb2.TokenIdLists(lists=[ids(9, 10)])
    asked.sampling.CopyFrom(
        worker_pb2.SamplingParams(
            **numbers, suppress_tokens=ids(4), begin_suppress_tokens=ids(5, 6), forced_eos_token_id=ids(8), bad_words_ids=words
        )
    )  # fmt: skip
    asked.stop.CopyFrom(
        worker_pb2.StopConditions(
            max_tokens=50, min_tokens=4, stop_token_ids=[11], stop_strings=["end"], ignore_eos=True
        )
    )
    asked.logprobs, asked.prompt_logprobs, asked.echo = 0, 20, True
    asked.tenant_salt, asked.tenant, asked.priority, asked.n = "salt", "tenant", -3, 2
    asked.boundaries.append(1)
    params = decode_generate(asked, PROMPTS)
    assert params.sampling == SamplingParams(
        **numbers, num_logprobs=0, suppress_tokens=(4,), begin_suppress_tokens=(5, 6), forced_eos_token_id=(8,),
        bad_words_ids=((9, 10),),
    )  # fmt: skip
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (50, 4, True)
    assert (params.stop_token_ids, params.stop_strings) == (frozenset({11}), ("end",))
    assert (params.num_prompt_logprobs, params.echo) == (20, True)
    assert (params.tenant_salt, params.tenant, params.priority, params.boundaries) == ("salt", "tenant", -3, (1,))
    assert params.num_answers == 2


@pytest.mark.parametrize("count", [0, 1, MAX_PROMPT_LOGPROBS, MAX_PROMPT_LOGPROBS + 1, 3 * MAX_PROMPT_LOGPROBS])
def test_a_long_prompt_is_told_in_several_messages(count: int) -> None:
    """In order, each small enough for gRPC's default limit of 4 MiB; everything else is in the last, the end of all."""
    entry = RowLogprobs(-1.5, [(index + 200_000, -0.5) for index in range(20)])
    prompt: list[RowLogprobs | None] = [None, *[entry] * (count - 1)] if count else []
    chunk = StreamChunk(
        0,
        [SampledToken(9, RowLogprobs(-0.25, []))],
        "text",
        worker_pb2.Usage(num_prompt_tokens=count, num_generated_tokens=1),
        EndReason.LENGTH,
        prompt_logprobs=prompt,
    )
    messages = list(encode_chunk(chunk))
    assert len(messages) == max(1, -(-count // MAX_PROMPT_LOGPROBS))
    assert all(message.ByteSize() < 4 << 20 for message in messages)
    assert all(message.usage.num_prompt_tokens == count for message in messages)
    assert all(not message.token_ids and not message.finish_reason for message in messages[:-1])
    last = messages[-1]
    assert (list(last.token_ids), last.text, last.finish_reason) == ([9], "text", worker_pb2.FINISH_REASON_LENGTH)
    assert last.logprobs[0].logprob == -0.25
    told = [item for message in messages for item in message.prompt_logprobs]
    assert [item.HasField("logprobs") for item in told] == [entry is not None for entry in prompt]
    for item in told[1:]:
        assert list(item.logprobs.top_token_ids) == [token for token, _ in entry.top]


def delivered(num_delivered: int, *token_ids: int) -> worker_pb2.GenerateRequest:
    """A prompt of which the last tokens were delivered before."""
    prompt = worker_pb2.TokenIds(ids=token_ids)
    return worker_pb2.GenerateRequest(sequence_id="s", attempt=2, token_ids=prompt, num_delivered_tokens=num_delivered)


def test_the_delivered_tokens_stay_part_of_the_prompt() -> None:
    params = decode_generate(delivered(2, 7, 8, 9), PROMPTS)
    assert (params.token_ids, params.num_delivered_tokens) == ([7, 8, 9], 2)


@pytest.mark.parametrize("num_delivered", [3, 4, 2**32 - 1])
def test_a_prompt_of_delivered_tokens_alone_is_refused(num_delivered: int) -> None:
    with pytest.raises(EngineError, match="less than the 3 tokens of the prompt") as caught:
        decode_generate(delivered(num_delivered, 7, 8, 9), PROMPTS)
    assert (caught.value.kind, caught.value.field) == (ErrorKind.INVALID, "num_delivered_tokens")


def test_delivered_tokens_cannot_be_counted_in_a_text() -> None:
    asked = worker_pb2.GenerateRequest(sequence_id="s", attempt=2, text="abc", num_delivered_tokens=1)
    with pytest.raises(EngineError, match="token_ids") as caught:
        decode_generate(asked, PROMPTS)
    assert caught.value.kind is ErrorKind.INVALID

"""One piece of an answer, as it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvpool.v1 import worker_pb2

from .errors import ProtocolError


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """An end-of-text id, a stop id or a stop string came."""
    LENGTH = "length"
    """The answer reached max_tokens or the model's longest sequence."""


_FINISH_REASONS: Final = {
    worker_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    worker_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    logprob: float
    """Natural logarithm of the token's probability under the model (temperature 1, no penalties, no truncation)."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, best first, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Times:
    """How the time of a finished request was spent, in milliseconds. The sum is at most the time from the call to the last
    chunk."""

    before_ms: int
    """Time before the request went to the worker that finished it: tokenising, routing, attempts on workers that went away."""
    waiting_ms: int
    """Time until that worker had blocks for it."""
    prefill_ms: int
    """Time from then until the first token was computed."""
    decode_ms: int
    """Time from the first token to the last."""
    preempted_ms: int
    """Time that preemptions cost: without blocks, and until it was as far as before. No other time includes it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens and the time that one request used."""

    num_prompt_tokens: int
    """Tokens of the prompt."""
    num_cached_tokens: int
    """Prompt tokens served from the cache at the first admission by the worker that delivered the first token: a multiple of
    the block size."""
    num_generated_tokens: int
    """Tokens generated so far, over all attempts."""
    num_preemptions: int
    """Number of times that the worker of this chunk has preempted and recomputed the sequence."""
    times: Times | None = None
    """How the time was spent, in the last chunk. None before that, without any token, if the worker went away after the last token,
    or if it does not report times."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer: some tokens and the text that has become certain. Either may be empty."""

    start_index: int
    """Index of token_ids[0] among all tokens of the answer, from 0."""
    token_ids: tuple[int, ...]
    """New tokens, without the id that ended the text."""
    text: str
    """New text. It may lag the tokens: incomplete characters and what may begin a stop string come later."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """Log-probabilities, one for each token; None: not asked for."""
    usage: Usage | None
    """Usage so far, in the first and the last chunk of a worker's stream; None in the others."""
    finish_reason: FinishReason | None
    """Why the answer ended, in its last chunk; None in the others."""
    worker_id: str
    """The worker that computed it."""
    attempt: int
    """1 for the first worker tried, larger for each next one. If it is larger than in the chunk before, the stream has moved."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    """Log-probabilities of the prompt's next tokens, in order; None: not asked for. They come before the first token of the answer.
    The entry of the prompt's first token is None, since nothing comes before it."""
    index: int = 0
    """Number of the answer that it belongs to, from 0. Chunks of a request's `n` answers come interleaved."""
    score: float | None = None
    """Score of a text of a beam search, in its last chunk: the sum of its log-probabilities / length ** length_penalty. Otherwise
    None."""


def chunk_from_proto(
    message: worker_pb2.GenerateResponse,
    *,
    start_index: int,
    worker_id: str,
    attempt: int,
    want_logprobs: bool,
    first_prompt_logprob: int | None,
    index: int = 0,
) -> Chunk:
    """Decode one message. ProtocolError for an unknown finish reason or a wrong number of log-probabilities.

    `first_prompt_logprob`: index of the first of the message's prompt_logprobs that is new; None: they were not asked for.
    """
    finish_reason = None
    if message.finish_reason != worker_pb2.FINISH_REASON_UNSPECIFIED:
        finish_reason = _FINISH_REASONS.get(message.finish_reason)
        if finish_reason is None:
            raise ProtocolError(
                f"{worker_id} ended its stream with the unknown finish reason {message.finish_reason}; "
                "is it of another version?",
                reason="UNKNOWN_FINISH_REASON",
            )
    if want_logprobs and len(message.logprobs) != len(message.token_ids):
        raise ProtocolError(
            f"{worker_id} sent {len(message.logprobs)} log-probabilities for {len(message.token_ids)} tokens",
            reason="LOGPROBS_MISSING",
        )
    return Chunk(
        start_index=start_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(_logprobs_from_proto(item) for item in message.logprobs) if want_logprobs else None,
        usage=_usage_from_proto(message.usage) if message.HasField("usage") else None,
        finish_reason=finish_reason,
        worker_id=worker_id,
        attempt=attempt,
        prompt_logprobs=None
        if first_prompt_logprob is None
        else tuple(
            _logprobs_from_proto(item.logprobs) if item.HasField("logprobs") else None
            for item in message.prompt_logprobs[first_prompt_logprob:]
        ),
        index=index,
        score=message.score if message.HasField("score") else None,
    )


def _logprobs_from_proto(message: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=message.logprob, top=tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    )


def _usage_from_proto(message: worker_pb2.Usage) -> Usage:
    spent = message.times
    # No worker knows the time before it got the request.
    times = Times(0, spent.waiting_ms, spent.prefill_ms, spent.decode_ms, spent.preempted_ms)
    return Usage(
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_generated_tokens=message.num_generated_tokens,
        num_preemptions=message.num_preemptions,
        times=times if message.HasField("times") else None,
    )

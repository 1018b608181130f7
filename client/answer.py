"""One answer of a request, put together over all the attempts that deliver parts of it. No I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvpool.v1 import worker_pb2

from .chunk import Chunk, FinishReason, Usage, chunk_from_proto
from .completion import CompletionBuilder
from .failover import Target
from .gate import Gate


class Answer:
    """Joins the messages of one answer, and checks that each continues the one before."""

    def __init__(self, index: int, request: worker_pb2.GenerateRequest) -> None:
        self.index: Final = index
        self.builder: Final = CompletionBuilder()
        self.is_finished = False
        """Whether the reader has taken its last chunk."""
        self._request = request
        self._gate = Gate()
        self._num_cached_tokens = 0
        """Those of the attempt that delivered the first token: of a later one it may be more than the prompt."""
        self._before_ms = 0
        """Time from the start of the call to that of the attempt."""

    def __repr__(self) -> str:
        return f"Answer({self.index}, {self._gate}, finished={self.is_finished})"

    @property
    def num_delivered(self) -> int:
        """Tokens delivered so far, over all attempts."""
        return self._gate.num_delivered

    @property
    def has_grown(self) -> bool:
        """Whether the present attempt has delivered tokens."""
        return self._gate.num_delivered > self._gate.base

    def begin(self, attempt: int, elapsed_ms: float) -> None:
        """Note that an attempt begins, `elapsed_ms` after the start of the call. Only this attempt may deliver from now on."""
        self._gate.open(attempt)
        self._before_ms = int(elapsed_ms)

    def take(self, message: worker_pb2.GenerateResponse, target: Target) -> Chunk | None:
        """Decode a message of the worker. None: it belongs to an older attempt. ProtocolError if it does not join on."""
        start_index = self._gate.take(target.attempt, message.start_index, len(message.token_ids))
        if start_index is None:
            return None
        num_known = self._gate.take_prompt(len(message.prompt_logprobs))
        chunk = chunk_from_proto(
            message,
            start_index=start_index,
            worker_id=target.worker_id,
            attempt=target.attempt,
            want_logprobs=self._request.HasField("logprobs"),
            first_prompt_logprob=num_known if self._request.HasField("prompt_logprobs") else None,
            index=self.index,
        )
        if chunk.usage is not None:
            chunk = replace(chunk, usage=self._joined(chunk.usage))
        return chunk

    def _joined(self, usage: Usage) -> Usage:
        """Convert the usage of the attempt to that of the answer. The attempt's prompt includes the tokens that were delivered
        before, the caller's does not."""
        before = self._gate.base
        if before == 0:
            self._num_cached_tokens = usage.num_cached_tokens
        return replace(
            usage,
            num_prompt_tokens=usage.num_prompt_tokens - before,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=before + usage.num_generated_tokens,
            times=None if usage.times is None else replace(usage.times, before_ms=self._before_ms),
        )

    def add(self, chunk: Chunk, elapsed_ms: float) -> Chunk:
        """Note that the reader gets this chunk, `elapsed_ms` after the start of the call."""
        self.builder.add(chunk, elapsed_ms)
        self.is_finished = chunk.finish_reason is not None
        return chunk

    def has_all_tokens(self, num_prompt_tokens: int, max_model_len: int) -> bool:
        """Whether no token can follow: the worker went away between the last one and the finish reason."""
        limit = max_model_len - num_prompt_tokens
        return 0 < self.num_delivered >= min(self._request.stop.max_tokens or limit, limit)

    def missing_end(self, target: Target, num_prompt_tokens: int) -> Chunk:
        """Return the last chunk in place of a worker that left before it sent one. A worker sends its last token and the text
        that it held back together with the finish reason, so no text is missing."""
        return Chunk(
            start_index=self.num_delivered,
            token_ids=(),
            text="",
            logprobs=() if self._request.HasField("logprobs") else None,
            usage=Usage(num_prompt_tokens, self._num_cached_tokens, self.num_delivered, num_preemptions=0),
            finish_reason=FinishReason.LENGTH,
            worker_id=target.worker_id,
            attempt=target.attempt,
            prompt_logprobs=() if self._request.HasField("prompt_logprobs") else None,
            index=self.index,
        )

"""A whole answer, and the builder that puts it together from chunks."""

from __future__ import annotations

from dataclasses import dataclass

from .chunk import Chunk, FinishReason, Times, TokenLogprobs, Usage
from .errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer."""

    text: str
    """All text, without the stop string or id that ended it; with `echo` the prompt's text comes first."""
    token_ids: tuple[int, ...]
    """All generated tokens, without the id that ended the text."""
    finish_reason: FinishReason
    """Why it ended."""
    num_prompt_tokens: int
    """Tokens of the prompt."""
    num_cached_tokens: int
    """Prompt tokens that the cache served: a multiple of the block size, always less than the prompt."""
    num_generated_tokens: int
    """Tokens generated, the id that ended the text included."""
    worker_id: str
    """The worker that computed the last token."""
    time_to_first_token_ms: float
    """Time from the start of the call, tokenising and routing included, to the first token (or to the end, if none came)."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """Log-probabilities, one for each token; None: not asked for."""
    num_preemptions: int
    """Number of times that the last worker has preempted and recomputed the sequence."""
    num_attempts: int
    """Workers tried, this one included."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Log-probabilities, one for each token of the prompt; None: not asked for. The first one is None, since nothing comes before
    that token."""
    times: Times | None = None
    """How the time was spent; None without any token, or if the worker does not report times."""
    score: float | None = None
    """Score of a text of a beam search, see Chunk.score; otherwise None."""


class CompletionBuilder:
    """Collects the chunks of one answer, in order."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """The tokens delivered so far. Owned by the builder: do not change."""
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._usage: Usage | None = None
        self._last: Chunk | None = None
        self._first_token_ms: float | None = None

    def add(self, chunk: Chunk, elapsed_ms: float) -> None:
        """Take in the next chunk, `elapsed_ms` after the start of the call."""
        self._text.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        if chunk.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += chunk.logprobs
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = self._prompt_logprobs or []
            self._prompt_logprobs += chunk.prompt_logprobs
        if chunk.usage is not None:
            self._usage = chunk.usage
        if self._first_token_ms is None and (chunk.token_ids or chunk.finish_reason is not None):
            self._first_token_ms = elapsed_ms
        self._last = chunk

    def build(self) -> Completion:
        """Return the answer. ProtocolError unless chunks with a finish reason and with usage were added and, if the prompt's
        log-probabilities were asked for, those of all its tokens."""
        last, usage, first_token_ms = self._last, self._usage, self._first_token_ms
        if last is None or last.finish_reason is None or usage is None or first_token_ms is None:
            raise ProtocolError(
                f"the answer is not complete: {len(self.token_ids)} tokens, "
                f"finish reason {last.finish_reason if last else None}, usage {usage}",
                reason="INCOMPLETE",
            )
        if self._prompt_logprobs is not None and len(self._prompt_logprobs) != usage.num_prompt_tokens:
            raise ProtocolError(
                f"{last.worker_id} sent log-probabilities of {len(self._prompt_logprobs)} tokens of the prompt, which has "
                f"{usage.num_prompt_tokens}",
                reason="LOGPROBS_MISSING",
            )
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self.token_ids),
            finish_reason=last.finish_reason,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_generated_tokens=usage.num_generated_tokens,
            worker_id=last.worker_id,
            time_to_first_token_ms=first_token_ms,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            num_preemptions=usage.num_preemptions,
            num_attempts=last.attempt,
            prompt_logprobs=None if self._prompt_logprobs is None else tuple(self._prompt_logprobs),
            times=usage.times,
            score=last.score,
        )

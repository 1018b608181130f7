"""The engine's counters: requests and their outcomes, tokens, steps, latencies.

Callers pass the time, in seconds of the engine's monotonic clock. A token costs one observation.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from kvpool.process.histogram import Histogram

from .errors import ErrorKind

if TYPE_CHECKING:
    from .request import Request

# vLLM's bounds, so that its dashboards show the same resolution, plus a few below 10 ms for small models.
REQUEST_SECONDS: Final = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_SECONDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
INTER_TOKEN_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0,
)  # fmt: skip
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SEQUENCES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
REQUEST_TOKENS: Final = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))

CANCELLED: Final = "cancelled"
"""Outcome of a request whose reader has gone or whose deadline has passed. The others are named like EndReason and ErrorKind."""


class EngineStats:
    """Counts since the process started."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_forwarded_tokens = 0
        """Tokens computed: prompts, also again after a preemption, and decodes."""
        self.num_decoded_tokens = 0
        """Tokens computed by decodes, a part of num_forwarded_tokens."""
        self.num_admitted_tokens = 0
        """Prompt tokens of requests that have got a block table, once per request."""
        self.num_looked_up_tokens = 0
        """Prompt tokens of those admitted requests that may be served from the cache."""
        self.num_cached_tokens = 0
        """Prompt tokens of admitted requests that the cache served."""
        self.num_prompt_tokens = 0
        """Prompt tokens of requests that have got their first token."""
        self.num_generated_tokens = 0
        self.ended: Counter[str] = Counter()
        """Accepted requests that have ended, by outcome: CANCELLED, or the name of an EndReason or an ErrorKind in lower case."""
        self.refused: Counter[ErrorKind] = Counter()
        """Requests not accepted, by reason."""
        self.step_seconds = Histogram(INTER_TOKEN_SECONDS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.step_sequences = Histogram(STEP_SEQUENCES)
        self.queue_seconds = Histogram(REQUEST_SECONDS)
        """Time from arrival to the first block table."""
        self.first_token_seconds = Histogram(FIRST_TOKEN_SECONDS)
        """Time from arrival to the first token."""
        self.inter_token_seconds = Histogram(INTER_TOKEN_SECONDS)
        """Time from each token to the next one of the same request."""
        # Finished requests:
        self.request_seconds = Histogram(REQUEST_SECONDS)
        self.prefill_seconds = Histogram(REQUEST_SECONDS)
        """Time from the first block table to the first token."""
        self.decode_seconds = Histogram(REQUEST_SECONDS)
        """Time from the first token to the last."""
        self.request_prompt_tokens = Histogram(REQUEST_TOKENS)
        self.request_generated_tokens = Histogram(REQUEST_TOKENS)

    def on_granted(self, request: Request, now: float) -> None:
        """A request has got a block table; only the first one counts."""
        times = request.times
        if times.granted_at is None:
            times.granted_at = now
            self.queue_seconds.observe(now - times.arrived_at)
            self.num_admitted_tokens += request.num_prompt_tokens
            if request.sequence.max_cached_tokens != 0:
                self.num_looked_up_tokens += request.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens

    def on_step(self, num_sequences: int, num_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step has completed, `seconds` after it was launched."""
        self.num_steps += 1
        self.num_forwarded_tokens += num_tokens
        self.num_decoded_tokens += num_decodes
        self.step_seconds.observe(seconds)
        self.step_tokens.observe(num_tokens)
        self.step_sequences.observe(num_sequences)

    def on_token(self, request: Request, now: float) -> None:
        """An answer has its next token, or the beams of a search have. The prompt counts with the first token."""
        times = request.times
        self.num_generated_tokens += 1
        if times.first_token_at is None:
            self.first_token_seconds.observe(now - times.arrived_at)
            self.num_prompt_tokens += request.num_prompt_tokens
        else:
            self.inter_token_seconds.observe(now - times.last_token_at)
        times.on_token(now)

    def on_finished(self, request: Request, outcome: str, now: float) -> None:
        """A request has finished, with all its answers, of which this is the first. Without a token there is no prefill or decode
        time."""
        self.ended[outcome] += 1
        times = request.times
        self.request_seconds.observe(now - times.arrived_at)
        self.request_prompt_tokens.observe(request.num_prompt_tokens)
        self.request_generated_tokens.observe(request.num_generated_in_all)
        if times.granted_at is not None and times.first_token_at is not None:
            self.prefill_seconds.observe(times.first_token_at - times.granted_at)
            last_token_at = max(answer.times.last_token_at for answer in request.answers)
            self.decode_seconds.observe(last_token_at - times.first_token_at)

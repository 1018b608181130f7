"""The parts of an answer's time, from its request to its end. Pure: callers pass the time, in ms after the request came."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvpool.client import Times


class PartState(StrEnum):
    """State of an answer during a part of its time."""

    WAITING = "waiting"
    """It has no blocks yet: tokenising, routing and the worker's queue."""
    PREFILL = "prefill"
    """The part of its prompt that the cache did not serve is computed."""
    DECODE = "decode"
    """Tokens are generated."""
    PREEMPTED = "preempted"
    """It was preempted, and is not yet as far as before. Workers report the sum, so this part is not in its true place."""
    MOVING = "moving"
    """Its worker went away, and the next one has granted no blocks yet."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part lasts until the next one begins or the answer ends."""

    state: PartState
    worker_id: str
    """Name of the worker; empty: none yet."""
    start_ms: float
    is_of_last: bool = True
    """Whether it belongs to the last attempt."""


class Timeline:
    """The parts so far, in order. They are the reader's view while the answer runs, and the worker's measurement in the end."""

    def __init__(self) -> None:
        self.parts = [Part(PartState.WAITING, "", 0.0, is_of_last=False)]
        self._attempt: int | None = None
        self._last_chunk_ms = 0.0

    def on_chunk(self, attempt: int, worker_id: str, now_ms: float, *, has_tokens: bool) -> None:
        """Note that a piece has come. The first one of an attempt comes when it has got its blocks."""
        last = self.parts[-1].state
        moved = attempt != self._attempt
        if moved and self._attempt is not None:
            ended = [Part(part.state, part.worker_id, part.start_ms, is_of_last=False) for part in self.parts]
            self.parts = [*ended, Part(PartState.MOVING, worker_id, self._last_chunk_ms, is_of_last=False)]
        state = PartState.DECODE if has_tokens else PartState.PREFILL
        if moved or (has_tokens and last is not state):
            self.parts.append(Part(state, worker_id, now_ms))
        self._attempt = attempt
        self._last_chunk_ms = now_ms

    def finish(self, times: Times) -> None:
        """Replace the parts of the last attempt by the times that its worker reports at the end of the answer."""
        worker_id = self.parts[-1].worker_id
        self.parts = [part for part in self.parts if not part.is_of_last]
        start = max(float(times.before_ms), self.parts[-1].start_ms)
        for state, duration in (
            (PartState.WAITING, times.waiting_ms),
            (PartState.PREFILL, times.prefill_ms),
            (PartState.PREEMPTED, times.preempted_ms),
            (PartState.DECODE, times.decode_ms),
        ):
            # The first token and what comes after it is always shown: it has the last part, which ends with the answer.
            if (duration or state is PartState.DECODE) and self.parts[-1].state is not state:
                self.parts.append(Part(state, worker_id, start))
            start += duration

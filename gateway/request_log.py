"""The last answers of this gateway: how long each waited, what it used, why no more of it was cached. In memory and bounded."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from typing import Any, Final

from kvpool.client import Chunk, GenerateStream, KvpoolError, Usage

from .timeline import Timeline

MAX_REASON: Final = 300
"""Longest kept text of an error, in characters."""


class Outcome(StrEnum):
    """How an answer ended, or that it runs."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    LEFT = "left"
    """Its reader went away."""


class AnswerRecord:
    """One answer, which is one sequence."""

    def __init__(
        self, log: RequestLog, number: int, request_id: str, choice: int, stream: GenerateStream, index: int
    ) -> None:
        self.number: Final = number
        """Number of the answer, from 1, in the order in which answers begin."""
        self.outcome = Outcome.RUNNING
        self.version = 0
        """Version of the log when this record last changed."""
        self.explanation: dict[str, Any] | None = None
        """Why no more of the prompt was cached before a worker got it, in the first answer to a prompt. None: not asked for, or not
        answered."""
        self._log = log
        self._request_id = request_id
        self._choice = choice
        self._index = index
        self._stream: GenerateStream | None = stream
        self._sequence_id = stream.sequence_id_of(index)
        self._model = ""
        self._began = log.clock()
        self._end_ms: float | None = None
        self._timeline = Timeline()
        self._num_generated = 0
        self._usage: Usage | None = None
        self._reason = ""

    def on_chunk(self, chunk: Chunk) -> None:
        """Take in the next piece of the answer."""
        if self._stream is not None and not self._model:
            self._learn(self._stream)
        has_tokens = bool(chunk.token_ids)
        self._timeline.on_chunk(chunk.attempt, chunk.worker_id, self._elapsed_ms(), has_tokens=has_tokens)
        self._num_generated += len(chunk.token_ids)
        self._usage = chunk.usage or self._usage
        if chunk.finish_reason is not None:
            self._end(Outcome.FINISHED, chunk.finish_reason.value)
        else:
            self._log.note(self)

    def on_error(self, error: KvpoolError) -> None:
        """Note that the answer failed. No effect if it has ended."""
        self._end(Outcome.FAILED, error.message[:MAX_REASON])

    def close(self) -> None:
        """Note that nobody reads the answer any more. No effect if it has ended."""
        self._end(Outcome.LEFT, "its reader went away")

    def as_object(self) -> dict[str, Any]:
        """Return the record as JSON values; milliseconds are counted from the request."""
        usage = self._usage
        return {
            "number": self.number,
            "request_id": self._request_id,
            "choice": self._choice,
            "sequence_id": self._sequence_id,
            "model": self._model,
            "outcome": self.outcome.value,
            "reason": self._reason,
            "age_ms": round(self._elapsed_ms(), 1),
            "end_ms": None if self._end_ms is None else round(self._end_ms, 1),
            "parts": [
                {"state": part.state.value, "worker_id": part.worker_id, "start_ms": round(part.start_ms, 1)}
                for part in self._timeline.parts
            ],
            "num_prompt_tokens": None if usage is None else usage.num_prompt_tokens,
            "num_cached_tokens": None if usage is None else usage.num_cached_tokens,
            "num_generated_tokens": self._num_generated,
            "num_preemptions": 0 if usage is None else usage.num_preemptions,
            "times": None if usage is None or usage.times is None else asdict(usage.times),
            "explained": self.explanation is not None,
        }

    def _learn(self, stream: GenerateStream) -> None:
        """Take over the model and the explanation, which the stream has from its first chunk on."""
        model, explanation = stream.model, stream.explanation
        if model is None:
            return
        self._model = model.name
        if explanation is not None and not self._index:
            self.explanation = explanation.as_object() | {"sentences": explanation.sentences(model.tokenizer)}

    def _end(self, outcome: Outcome, reason: str) -> None:
        if self.outcome is not Outcome.RUNNING:
            return
        self.outcome, self._reason = outcome, reason
        self._end_ms = self._elapsed_ms()
        self._stream = None  # it holds the prompt
        if self._usage is not None and self._usage.times is not None:
            self._timeline.finish(self._usage.times)
        self._log.note(self)
        self._log.on_ended(self)

    def _elapsed_ms(self) -> float:
        return (self._log.clock() - self._began) * 1000


class RequestLog:
    """The answers that run, and the last ones that have ended."""

    def __init__(self, max_ended: int, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self.max_ended: Final = max_ended
        self.clock = clock
        self.version = 0
        """Number that grows with every change."""
        self.on_change: Callable[[], None] | None = None
        """Called at every change, so it must be quick. None: nobody looks."""
        self._records: dict[int, AnswerRecord] = {}
        self._ended: deque[int] = deque()
        self._numbers = itertools.count(1)

    def begin(self, request_id: str, choice: int, stream: GenerateStream, index: int) -> AnswerRecord:
        """Begin the record of the answer with this index in its stream. It is kept while the answer runs."""
        record = AnswerRecord(self, next(self._numbers), request_id, choice, stream, index)
        self._records[record.number] = record
        self.note(record)
        return record

    def find(self, number: int) -> AnswerRecord | None:
        """Return a record; None: it does not exist, or is not kept any more."""
        return self._records.get(number)

    @property
    def numbers(self) -> list[int]:
        """Numbers of all records that are kept."""
        return list(self._records)

    def changed_since(self, version: int) -> list[AnswerRecord]:
        """Return the records that changed after this version, oldest first; 0: all."""
        return [record for record in self._records.values() if record.version > version]

    def note(self, record: AnswerRecord) -> None:
        """Note that a record has changed."""
        self.version += 1
        record.version = self.version
        if self.on_change is not None:
            self.on_change()

    def on_ended(self, record: AnswerRecord) -> None:
        """Note that an answer has ended: keep its record, and at most `max_ended` of that kind."""
        self._ended.append(record.number)
        while len(self._ended) > self.max_ended:
            del self._records[self._ended.popleft()]

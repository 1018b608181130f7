"""Which streams live, and the names that they may still give: no two live sequences of a worker have one name."""

from __future__ import annotations

from collections import Counter

from kvpool.protocol.answers import asked_id

from ..cache.sequence import SequenceId
from .request import GenerationParams, Request


class LiveStreams:
    """The streams of the requests that have not ended. A stream lives as long as one of its answers."""

    def __init__(self) -> None:
        self._num_answers: Counter[SequenceId] = Counter()
        """Live answers of each stream."""
        self._naming: set[SequenceId] = set()
        """Live streams that name further sequences after their own."""

    def add(self, request: Request) -> None:
        """Count an answer that begins to live."""
        stream = _stream(request.answers[0].params)
        self._num_answers[stream] += 1
        if _names_more(request.answers[0].params):
            self._naming.add(stream)

    def remove(self, request: Request) -> None:
        """Count an answer that has ended."""
        stream = _stream(request.answers[0].params)
        self._num_answers[stream] -= 1
        if not self._num_answers[stream]:
            del self._num_answers[stream]
            self._naming.discard(stream)

    def would_clash(self, params: GenerationParams) -> bool:
        """Whether a live stream has the name of that request, or one of both could give a name that the other has."""
        stream = _stream(params)
        return (
            stream in self._num_answers
            or _asked(stream) in self._naming
            or (_names_more(params) and any(_asked(other) == stream for other in self._num_answers))
        )


def _stream(params: GenerationParams) -> SequenceId:
    return SequenceId(params.sequence_id, params.attempt)


def _asked(stream: SequenceId) -> SequenceId | None:
    asked = asked_id(stream.sequence_id)
    return None if asked is None else SequenceId(asked, stream.attempt)


def _names_more(params: GenerationParams) -> bool:
    return params.num_answers > 1 or params.beams is not None

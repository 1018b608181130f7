"""The live attempts of each sequence over all sessions: a larger attempt fences the smaller ones on every session."""

from __future__ import annotations

from collections.abc import Iterator

from .messages import SequenceKey, Stop
from .refusal import Reason, Refusal
from .sequence import Owner, Sequence


def fenced(key: SequenceKey) -> Refusal:
    """The refusal of a sequence that a larger attempt has fenced, whether or not that one still lives."""
    return Refusal(
        Reason.STALE_ATTEMPT,
        f"attempt {key.attempt} of sequence {key.sequence_id!r} is fenced by a larger one: end the stream and Free it",
    )


class Fencing:
    """Live sequences by sequence_id. An entry is dropped with its sequence."""

    def __init__(self) -> None:
        self._live: dict[str, list[Sequence]] = {}

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._live.values():
            yield from sequences

    def living(self, sequence_id: str) -> list[Sequence]:
        """Live sequences with this id on sessions that are not retired."""
        return [sequence for sequence in self._live.get(sequence_id, ()) if not sequence.session.retired]

    def check(self, key: SequenceKey, session: Owner) -> None:
        """Refuse an attempt that a larger one has fenced, or that lives on another session already."""
        if key.sequence_id not in self._live:
            return
        living = self.living(key.sequence_id)
        for other in living:
            if other.key.attempt > key.attempt:
                raise Refusal(
                    Reason.STALE_ATTEMPT,
                    f"attempt {key.attempt} of sequence {key.sequence_id!r} is fenced: attempt {other.key.attempt} "
                    f"lives on worker {other.session.worker_id!r}; end this stream",
                )
        for other in living:
            if other.key.attempt == key.attempt and other.session is not session:
                raise Refusal(
                    Reason.SEQUENCE_ELSEWHERE,
                    f"attempt {key.attempt} of sequence {key.sequence_id!r} already lives on worker "
                    f"{other.session.worker_id!r}; try again with a larger attempt",
                )

    def add(self, sequence: Sequence) -> None:
        """Enter a new live sequence, fence its smaller attempts and push a Stop to their workers.

        A worker whose downlink is full gets no Stop; its next Append fails.
        """
        others = self._live.get(sequence.key.sequence_id)
        if others is None:
            self._live[sequence.key.sequence_id] = [sequence]
            return
        for other in others:
            if other.key.attempt < sequence.key.attempt:
                self.fence(other)
        others.append(sequence)

    def fence(self, sequence: Sequence) -> None:
        """A larger attempt lives on another session: only Free is accepted from now on, and the worker gets a Stop."""
        if not sequence.fenced:
            sequence.fenced = True
            if not sequence.session.downlink.is_full:
                sequence.session.downlink.push(Stop(sequence.key))

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        others = self._live[sequence.key.sequence_id]
        others.remove(sequence)
        if not others:
            del self._live[sequence.key.sequence_id]

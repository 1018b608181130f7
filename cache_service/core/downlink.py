"""A session's downlink: the numbered entries that every reply repeats until the worker acknowledges them."""

from __future__ import annotations

from .messages import DownlinkEntry, Drain, Entry, Grant

_ENTRY_WEIGHT = 16
"""Weight in blocks of an entry that grants none: the id of a sequence is as long."""


def _weight(entry: Entry) -> int:
    """Size of an entry in a message, in blocks."""
    return max(len(entry.blocks), 1) if isinstance(entry, Grant) else _ENTRY_WEIGHT


class Downlink:
    """The entries of one session.

    A reply has entries of `max_blocks` blocks at most, or one that is larger; the rest waits until some of these are acknowledged.
    """

    def __init__(self, max_entries: int, max_blocks: int) -> None:
        self._max_entries = max_entries
        self._max_blocks = max_blocks
        self._entries: list[DownlinkEntry] = []
        self._weight = 0
        self.last_number = 0
        """Number of the newest entry ever pushed."""

    @property
    def is_full(self) -> bool:
        """Whether the worker must acknowledge entries before more can be pushed."""
        return len(self._entries) >= self._max_entries

    def push(self, entry: Entry) -> None:
        """Append an entry under the next number. The list must not be full, except for the session's one Drain."""
        assert not self.is_full or isinstance(entry, Drain)
        self.last_number += 1
        self._weight += _weight(entry)
        self._entries.append(DownlinkEntry(self.last_number, entry))

    def acknowledge(self, number: int) -> None:
        """Drop entries up to `number`. A late acknowledgement drops nothing."""
        entries = self._entries
        if not entries or entries[0].number > number:
            return
        if number >= self.last_number:  # nearly always
            self._entries, self._weight = [], 0
            return
        self._entries = [entry for entry in entries if entry.number > number]
        self._weight = sum(_weight(entry.entry) for entry in self._entries)

    def pending(self) -> tuple[DownlinkEntry, ...]:
        """Entries not acknowledged, oldest first, as many as one reply may have."""
        if self._weight <= self._max_blocks:
            return tuple(self._entries)
        weight = count = 0
        for entry in self._entries:
            weight += _weight(entry.entry)
            if weight > self._max_blocks and count:
                break
            count += 1
        return tuple(self._entries[:count])

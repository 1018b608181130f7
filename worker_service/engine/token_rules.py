"""Which tokens must not follow, or must, by what a text holds: the rules of `generate` that look at tokens.

They are those of transformers 5.23 (`NoRepeatNGram`, `EncoderNoRepeatNGram`, `NoBadWords`, `ForcedEOSToken`, `SuppressTokens` and
`SuppressTokensAtBegin` of its logits processors).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import NamedTuple

from kvpool.protocol.sampling import Sampling


class NextIds(NamedTuple):
    """The ids that one token must not, or must, be."""

    banned: Collection[int] = ()
    """Ids that must not be chosen."""
    forced: Sequence[int] = ()
    """Ids of which one must be chosen; none: any may be."""


class _Runs:
    """The runs of n tokens in a text: what has followed each run of n − 1."""

    def __init__(self, length: int, tokens: Iterable[int] = ()) -> None:
        self._num_before = length - 1
        self._last: tuple[int, ...] = ()
        self._followers: dict[tuple[int, ...], list[int]] = {}
        for token_id in tokens:
            self.add(token_id)

    def copy(self) -> _Runs:
        again = _Runs(self._num_before + 1)
        again._last = self._last
        again._followers = {before: list(after) for before, after in self._followers.items()}
        return again

    def add(self, token_id: int) -> None:
        if len(self._last) == self._num_before:
            self._followers.setdefault(self._last, []).append(token_id)
        self._last = (*self._last, token_id)[-self._num_before :] if self._num_before else ()

    def after(self, tokens: Sequence[int]) -> Sequence[int]:
        """What has followed the last tokens of a text."""
        last = tuple(tokens[len(tokens) - self._num_before :]) if len(tokens) >= self._num_before else None
        return () if last is None else self._followers.get(last, ())


class TokenRules:
    """The rules for one text. They grow with every token; the cost of one does not depend on how many there are."""

    def __init__(
        self, sampling: Sampling, tokens: Sequence[int], source: Iterable[int], ending_ids: Collection[int]
    ) -> None:
        """`tokens`: the text so far; `source`: the encoder's input, or the prompt."""
        self._sampling = sampling
        self._ending_ids = ending_ids
        size = sampling.no_repeat_ngram_size
        self._own = _Runs(size, tokens) if size else None
        size = sampling.encoder_no_repeat_ngram_size
        self._of_source = _Runs(size, source) if size else None
        words = [word for word in sampling.bad_words_ids if len(word) > 1 or word[0] not in ending_ids]
        self._bad_ids = frozenset(word[0] for word in words if len(word) == 1)
        self._bad_words = [word for word in words if len(word) > 1]

    def copy(self) -> TokenRules:
        """The rules of a fork that goes on from here."""
        again = copy(self)
        again._own = None if self._own is None else self._own.copy()
        return again

    def add(self, token_id: int) -> None:
        """The text has one token more."""
        if self._own is not None:
            self._own.add(token_id)

    def next(self, tokens: Sequence[int], *, is_first: bool, is_last: bool, may_end: bool) -> NextIds:
        """The ids that are banned or forced after `tokens`, which are all of the text. `is_first`, `is_last`: of the answer;
        `may_end`: whether it may be an id that ends the text."""
        sampling = self._sampling
        banned = set(sampling.suppress_tokens)
        if is_first:
            banned.update(sampling.begin_suppress_tokens)
        if is_last and sampling.forced_eos_token_id:
            return NextIds(banned, sampling.forced_eos_token_id)
        for runs in (self._own, self._of_source):
            if runs is not None:
                banned.update(runs.after(tokens))
        banned |= self._bad_ids
        for *before, last in self._bad_words:
            if list(tokens[-len(before) :]) == before:
                banned.add(last)
        if not may_end:
            banned.update(self._ending_ids)
        return NextIds(banned)

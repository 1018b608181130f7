"""Beam search: which continuations of which beams go on, which texts have ended, and when no better one can come.

The algorithm alone: no cache, no scheduler, no torch. It decides as transformers' `generate(num_beams=…)` does (version 5.23,
`GenerationMixin._beam_search`), number by number: scores are float32, as its tensors are, because rounding decides between close
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

import numpy as np

from kvpool.v1.worker_pb2 import EARLY_STOPPING_FULL, EARLY_STOPPING_NEVER, EARLY_STOPPING_UNSPECIFIED, EarlyStopping

from ..step import BeamCandidate, BeamCandidates, RowLogprobs

_IMPOSSIBLE = np.float32(-1e9)
"""Added to the score of what must not be chosen; also the score of what is not there."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    num_beams: int
    """2 or more."""
    length_penalty: float = 1.0
    """A text's score is the sum of its log-probabilities divided by length ** length_penalty: above 0 favours long texts."""
    early_stopping: EarlyStopping = EARLY_STOPPING_UNSPECIFIED
    """When a search with as many ended texts as beams ends: if the best beam, at its present length, has no better score than the
    worst of them; FULL: at once; NEVER: if no beam can reach a better score, at any length up to the limit."""


@dataclass(frozen=True, slots=True, eq=False)
class BeamNode:
    """The last token of a text, and what is before it. Texts share their beginnings."""

    parent: BeamNode | None
    """None: the prompt is before it."""
    token_id: int
    logprobs: RowLogprobs
    length: int
    """Tokens of the text."""

    def tokens(self) -> list[BeamNode]:
        """The nodes of the whole text, first to last."""
        return list(self._backwards())[::-1]

    def _backwards(self) -> Iterator[BeamNode]:
        node: BeamNode | None = self
        while node is not None:
            yield node
            node = node.parent


class Continuation(NamedTuple):
    """A beam of the next step."""

    beam: int
    """Index of the beam of this step that it continues."""
    node: BeamNode
    """The text with its new last token."""


class EndedText(NamedTuple):
    node: BeamNode
    score: float
    """The score, as transformers' `sequences_scores` has it."""
    has_met_end: bool
    """Whether its last token, or what it completes, ends it; else its length."""


class _Found(NamedTuple):
    """One of the best continuations of a step."""

    beam: int
    candidate: BeamCandidate
    score: np.float32
    """Sum of the text's log-probabilities."""
    has_met_end: bool
    is_last: bool
    """Whether nothing may follow, for whatever reason."""


class BeamSearch:
    """One search, step by step. A step has one row of candidates for each running beam: `beams`, one before the first step."""

    def __init__(self, params: BeamParams, *, max_new_tokens: int, num_ending_ids: int) -> None:
        """`num_ending_ids`: ids that end a text. The more there are, the more continuations are looked at, so that enough go on."""
        self.params = params
        self.num_candidates = max(2, 1 + num_ending_ids) * params.num_beams
        """Candidates needed for each beam; fewer if the vocabulary has fewer."""
        self.beams: list[BeamNode | None] = [None]
        """Running texts, best first; None: the prompt alone."""
        self.is_over = False
        self._max_new_tokens = max_new_tokens
        # Before the first step all beams are equal, so only the first may be continued.
        self._scores = [np.float32(0), *[_IMPOSSIBLE] * (params.num_beams - 1)]
        self._length = 0
        self._may_improve = True
        nothing = EndedText(BeamNode(None, -1, RowLogprobs(0.0, []), 0), float(_IMPOSSIBLE), False)
        self._ended = [(nothing, False)] * params.num_beams
        """The best ended texts, and whether there is one at that place."""

    @property
    def ended(self) -> list[EndedText]:
        """The texts that have ended, best first; when the search is over, as many as beams."""
        return [text for text, is_there in self._ended if is_there]

    @np.errstate(over="ignore")  # of what must not be chosen, divided by a small number
    def advance(self, rows: Sequence[BeamCandidates], ends: Callable[[int, int], bool]) -> list[Continuation]:
        """Take the candidates of each beam, in the order of `beams`; returns the beams of the next step, which `beams` are then.
        There are none if the search is over. `ends`: whether the beam's text ends with that token."""
        assert not self.is_over
        assert len(rows) == len(self.beams)
        best = self._best(rows, ends)
        nodes = [
            BeamNode(self.beams[beam], found.token_id, RowLogprobs(found.logprob, rows[beam].top), self._length + 1)
            for beam, found, *_ in best
        ]
        self._end_texts(best, nodes)
        running = self._go_on(best)
        self._length += 1
        self._scores = [score for _, score in running]
        continuations = [Continuation(best[index].beam, nodes[index]) for index, _ in running]
        self._may_improve = self._may_improve and self._can_improve()
        self.is_over = (
            not self._may_improve
            or (self._is_full and self.params.early_stopping == EARLY_STOPPING_FULL)
            or all(continuation.is_last for continuation in best)
        )
        self.beams = [] if self.is_over else [node for _, node in continuations]
        return [] if self.is_over else continuations

    @property
    def _is_full(self) -> bool:
        return all(is_there for _, is_there in self._ended)

    def _best(self, rows: Sequence[BeamCandidates], ends: Callable[[int, int], bool]) -> list[_Found]:
        """The continuations with the best sums, best first."""
        # Before the first step there is one row for all beams.
        of_beams = [(index, rows[index % len(rows)].best) for index in range(self.params.num_beams)]
        sums = [
            (np.float32(candidate.score) + self._scores[index], index % len(rows), candidate)
            for index, candidates in of_beams
            for candidate in candidates
        ]
        # nlargest keeps the order of equal ones.
        best = nlargest(self.num_candidates, sums, key=lambda entry: entry[0])
        is_longest = self._length + 1 >= self._max_new_tokens
        continuations = []
        for score, beam, candidate in best:
            has_met_end = ends(beam, candidate.token_id)
            continuations.append(_Found(beam, candidate, score, has_met_end, has_met_end or is_longest))
        return continuations

    def _go_on(self, best: list[_Found]) -> list[tuple[int, np.float32]]:
        """The best continuations that have not ended: indices into `best`, and their sums."""
        scored = [
            (index, continuation.score + _IMPOSSIBLE if continuation.is_last else continuation.score)
            for index, continuation in enumerate(best)
        ]
        return nlargest(self.params.num_beams, scored, key=lambda entry: entry[1])

    def _end_texts(self, best: list[_Found], nodes: list[BeamNode]) -> None:
        """Keep the best of the texts that had ended before and those that end now. Only the best `num_beams` continuations may end:
        the others are there so that beams are left."""
        num_beams = self.params.num_beams
        is_closed = self._is_full and self.params.early_stopping == EARLY_STOPPING_FULL
        divisor = np.float32((self._length + 1) ** self.params.length_penalty)
        merged = [(np.float32(text.score), (text, is_there)) for text, is_there in self._ended]
        for place, (continuation, node) in enumerate(zip(best, nodes, strict=True)):
            has_ended = continuation.is_last and place < num_beams
            score = continuation.score / divisor
            for is_out in (is_closed, not self._may_improve, not has_ended):
                score += _IMPOSSIBLE if is_out else np.float32(0)
            merged.append((score, (EndedText(node, float(score), continuation.has_met_end), has_ended)))
        self._ended = [text for _, text in nlargest(num_beams, merged, key=lambda entry: entry[0])]

    def _can_improve(self) -> bool:
        """Whether the best running text may still become better than the worst one that has ended."""
        params = self.params
        length = self._length
        if params.early_stopping == EARLY_STOPPING_NEVER and params.length_penalty > 0:
            length = self._max_new_tokens
        possible = self._scores[0] / np.float32(length**params.length_penalty)
        worst = min(np.float32(text.score) for text, _ in self._ended)
        # A place without a text counts as the worst there can be.
        return any(possible > (worst if is_there else _IMPOSSIBLE) for _, is_there in self._ended)

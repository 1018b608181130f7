"""A request whose texts are found by beam search: one sequence until its prompt is computed, then one for each beam.

Its beams are held, preempted and resumed together, because none can go on without the others. A beam that is continued twice is
forked; one that is not continued is freed. `beam_search.py` decides which are continued. After a preemption the common beginning of
all beams is computed once, and they are forked from there: what a group holds never exceeds its prompt and the rest of each beam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from tokenizers import Tokenizer

from kvpool.protocol.answers import answer_id

from ..cache.engine_cache import EngineCache
from ..cache.sequence import CacheSequence
from ..step import BeamCandidates, BlockCopy, SampledToken, SequencePart
from ..token_counts import TokenCounts
from .beam_search import BeamSearch, EndedText
from .detokenizer import TextDecoder
from .request import GenerationParams, Request
from .stream import MAX_CHUNK_TOKENS, EndReason, StreamChunk
from .token_rules import TokenRules


class _Branch(NamedTuple):
    """A beam to come, of the sequence that it continues."""

    parent: CacheSequence
    token_ids: list[int]
    """Tokens that it adds to its parent's."""


class BeamRequest(Request):
    """One request for all of its answers: see the module."""

    def __init__(
        self,
        params: GenerationParams,
        sequence: CacheSequence,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        assert params.beams is not None
        self._num_beams = params.beams.num_beams
        super().__init__(params, sequence, max_tokens, stop_token_ids, None)
        self.num_forks_due = 0
        self._tokenizer = tokenizer
        self._search = BeamSearch(params.beams, max_new_tokens=max_tokens, num_ending_ids=len(stop_token_ids))
        self._beams = [sequence]
        """Sequences in the order of the search's beams; the root alone while the prompt, or what all beams begin with, is
        computed."""
        self._branches: list[_Branch] = []
        """The next beams, best first; they replace the present ones as soon as there are blocks for all of them."""
        self._branched: dict[int, CacheSequence] = {}
        """Sequences of those branches that have one already, by the branch's index."""
        self._rows: dict[CacheSequence, BeamCandidates] = {}
        """What each beam may continue with, as far as it is computed."""
        self._decoders: list[TextDecoder] = []
        """A decoder for each beam, if stop strings may end a text; empty otherwise."""
        if params.stop_strings and tokenizer is not None:
            self._decoders = [params.text_decoder(tokenizer)]
        self._num_named = 0

    @property
    def sequences(self) -> tuple[CacheSequence, ...]:
        return (*self._beams, *(sequence for sequence in self._branched.values() if sequence not in self._beams))

    @property
    def num_places(self) -> int:
        return self._num_beams

    @property
    def num_uncomputed_tokens(self) -> int:
        return sum(sequence.num_uncomputed_tokens for sequence in self.sequences)

    @property
    def is_over(self) -> bool:
        """Whether the search has ended: `finish` is to be called."""
        return self._search.is_over

    @property
    def is_branching(self) -> bool:
        """Whether the next beams are chosen, and `branch` is to be called before they can be computed."""
        return bool(self._branches)

    def part(self, sequence: CacheSequence, num_tokens: int, *, samples: bool) -> SequencePart:
        # While it resumes, the beginning of all beams is computed again.
        is_resuming = self.num_generated > 0 and len(self._beams) == 1
        part = super().part(sequence, num_tokens, samples=samples and not is_resuming)
        if part.sampling is None:
            return part
        counts = None
        if self.params.sampling.has_penalties:
            num_prompt = len(self.params.token_ids)
            counts = TokenCounts(sequence.tokens[:num_prompt], sequence.tokens[num_prompt:])
        return part._replace(num_candidates=self._search.num_candidates, counts=counts)

    def _rules_for(self, sequence: CacheSequence) -> TokenRules | None:
        return self._rules_of(sequence.tokens)

    def take_row(self, sequence: CacheSequence, row: BeamCandidates | None) -> bool:
        """A step has computed a sequence to its end; `row`: what it may continue with, None of a root that is computed again.
        Returns whether all beams are there: then the next ones are chosen, or the search is over."""
        if row is None:
            self._branch_again()
            return False
        self._rows[sequence] = row
        if len(self._rows) < len(self._beams):
            return False
        rows = [self._rows[beam] for beam in self._beams]
        self._rows = {}
        following = self._search.advance(rows, self._ends)
        self.num_generated += 1
        if self._decoders:
            self._decoders = [_after(self._decoders[beam], node.token_id) for beam, node in following]
        self._branches = [_Branch(self._beams[beam], [node.token_id]) for beam, node in following]
        return True

    def _ends(self, beam: int, token_id: int) -> bool:
        if token_id in self._stop_token_ids:
            return True
        return bool(self._decoders) and _after(self._decoders[beam], token_id).is_stopped

    def _branch_again(self) -> None:
        """Make branches for all beams once the root is computed, which has what all of them begin with."""
        root = self._beams[0]
        num_common = len(root.tokens) - len(self.params.token_ids)
        self._branches = [_Branch(root, text[num_common:]) for text in self._texts()]

    def _texts(self) -> list[list[int]]:
        """What each beam has generated."""
        return [[node.token_id for node in beam.tokens()] for beam in self._search.beams if beam is not None]

    def branch(self, cache: EngineCache) -> Iterator[Sequence[BlockCopy]]:
        """Free the beams that end and fork those that are continued more than once, as far as there are blocks; yields what the
        next step copies. If `is_branching` holds afterwards, it must be called again."""
        parents = [branch.parent for branch in self._branches]
        for beam in self._beams:
            if beam not in parents:
                cache.free(beam)
        self._beams = [beam for beam in self._beams if beam in parents]
        self.sequence = self._beams[0]  # one that lives, also if there are no blocks for all forks yet
        for index, branch in enumerate(self._branches):
            # The last one of each parent goes on with its blocks, when no other one needs them as they are.
            if index in self._branched or branch.parent not in parents[index + 1 :]:
                continue
            self._num_named += 1
            forked = cache.fork(branch.parent, answer_id(self.params.sequence_id, self._num_named))
            if forked is None:
                return
            forked.sequence.level = self.rank.level
            self._branched[index] = forked.sequence
            yield forked.copies
        self._beams = [self._branched.get(index, branch.parent) for index, branch in enumerate(self._branches)]
        for beam, branch in zip(self._beams, self._branches, strict=True):
            for token_id in branch.token_ids:
                cache.add_token(beam, token_id)
        for beam in self._beams:
            beam.num_forks_to_come = 0
        # Which beams will be forked is open; how many blocks that takes at most is not.
        self.sequence = self._beams[0]
        self._expect_forks()
        self._branches, self._branched = [], {}

    def preempt(self, cache: EngineCache) -> None:
        if not self.num_generated:
            super().preempt(cache)
            self._beams = [self.sequence]
            return
        self.num_preemptions += 1
        for sequence in self.sequences:
            cache.free(sequence)
        self._num_named += 1
        # Without the last token of the texts, so that each has one to compute, also if two of them are equal.
        at_each = zip(*(text[:-1] for text in self._texts()), strict=True)
        common = takewhile(lambda several: len(set(several)) == 1, at_each)
        tokens = [*self.params.token_ids, *(several[0] for several in common)]
        self.sequence = self.sequence.alone(answer_id(self.params.sequence_id, self._num_named), tokens)
        self._expect_forks()
        self._beams = [self.sequence]
        self._branches, self._branched, self._rows = [], {}, {}

    def finish(self) -> EndReason:
        """Pass on the best texts; returns why the best one ended."""
        for index, ended in enumerate(self._search.ended[: self.params.num_answers]):
            reason = EndReason.STOP if ended.has_met_end else EndReason.LENGTH
            if not index:
                self.finish_reason = reason
            for chunk in self._chunks(index, ended, reason):
                self.stream.put(chunk)
        assert self.finish_reason is not None
        assert self.stream.is_finished
        return self.finish_reason

    def _chunks(self, index: int, ended: EndedText, reason: EndReason) -> Iterator[StreamChunk]:
        decoder = None if self._tokenizer is None else self.params.text_decoder(self._tokenizer)
        nodes = ended.node.tokens()
        if nodes[-1].token_id in self._stop_token_ids:
            nodes.pop()
        wants_logprobs = self.params.sampling.num_logprobs is not None
        chunk = StreamChunk(0, index=index)
        for place, node in enumerate(nodes):
            if len(chunk.tokens) == MAX_CHUNK_TOKENS:
                yield chunk
                chunk = StreamChunk(place, index=index)
            chunk.tokens.append(SampledToken(node.token_id, node.logprobs if wants_logprobs else None))
            if decoder is not None:
                chunk.text += decoder.add(node.token_id)
        if decoder is not None:
            chunk.text += decoder.finish()
        chunk.finish_reason, chunk.score = reason, ended.score
        chunk.usage = self.usage()
        chunk.usage.num_generated_tokens = ended.node.length
        yield chunk


def _after(decoder: TextDecoder, token_id: int) -> TextDecoder:
    """The decoder of a text that goes on with that token."""
    again = decoder.copy()
    again.add(token_id)
    return again

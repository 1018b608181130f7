"""The worker of a walkthrough: a worker's real cache side over the manager's real core. Steps compute nothing and take no time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from kvpool.cache_service import worker_codec
from kvpool.cache_service.core.block_pool import BlockPool, State
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.session import Session
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache import events
from kvpool.worker_service.cache.engine_cache import Computed, EngineCache
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState

from .calls import execute, in_words
from .layouts import BLOCK_SIZE, CHUNK_TOKENS, ONE_GROUP, Layout, cache_settings
from .words import Words

WORKER_ID: Final = "worker-0"

_ROOT: Final = common_pb2.Root(model_fingerprint="walkthrough")
_REPORT_SECONDS: Final = 1.0
"""Time that passes before a scene ends in which something was computed: long enough for the report to be due."""


class UnexpectedAnswer(Exception):
    """The core or the cache side does something else than the story needs."""


class NewTable(NamedTuple):
    """The grant of a sequence."""

    blocks: tuple[int, ...]
    """Blocks of the first group, from table index 0 on."""
    num_cached_tokens: int
    named: tuple[int, ...]
    """Blocks of the window or snapshot that is hit, in the last group if that has a window or a state."""
    scratch: tuple[int, ...]
    boundaries: tuple[int, ...]
    """Boundaries of the sequence, in tokens."""


class Worker:
    """One worker. A story says what its engine does; the cache side makes the calls that are due then."""

    def __init__(self, layout: Layout = ONE_GROUP) -> None:
        self.words = Words()
        self.layout = layout
        self.manager = CacheManager(epoch=1)
        self.cache = EngineCache(cache_settings(layout))
        self._sequences: dict[str, CacheSequence] = {}
        self._prompt_lengths: dict[str, int] = {}
        self._calls: list[str] = []
        self._now = 0.0
        request = cache_pb2.RegisterRequest(
            worker_id=WORKER_ID,
            incarnation=1,
            register_no=1,
            model_fingerprint=_ROOT.model_fingerprint,
            kv_cache_config=cache_settings(layout).kv_cache_config(),
        )
        epoch, number = self.manager.register(worker_codec.decode_registration(request), self._now)
        self.cache.on_registered(cache_pb2.RegisterResponse(epoch=epoch, session=number))

    # -- what the manager has

    @property
    def session(self) -> Session:
        """The manager's session of this worker."""
        return self.manager.worker(WORKER_ID)

    @property
    def pool(self) -> BlockPool:
        """The pool of its first group."""
        return self.session.pools[0]

    def table(self, name: str) -> list[int]:
        """Return the block table of a live sequence in the first group."""
        return list(self.named(name, 0).values())

    def named(self, name: str, group: int = -1) -> dict[int, int]:
        """Return the blocks of a live sequence that have a place in a group, by table index."""
        places = self.session.by_slot[group].places(self.session.sequences[name, 1])
        return dict(sorted((index, block) for index, block in places if index is not None))

    def scratch(self, name: str, group: int = -1) -> tuple[int, ...]:
        """Return the blocks of a live sequence that have no place in a group."""
        places = self.session.by_slot[group].places(self.session.sequences[name, 1])
        return tuple(block for index, block in places if index is None)

    def boundaries(self, name: str) -> tuple[int, ...]:
        """Return the lengths, in tokens, at which a live sequence has yet to name a window or a snapshot."""
        return tuple(boundary * BLOCK_SIZE for boundary in self.session.sequences[name, 1].boundaries)

    def blocks_in(self, state: State, among: Iterable[int] | None = None, *, group: int = 0) -> list[int]:
        """Return the blocks in a state, of all blocks or of those `among`, in their order."""
        pool = self.session.pools[group]
        return [block for block in (among or range(1, pool.num_blocks)) if pool.state(block) is state]

    # -- what the engine does

    def allocate(self, name: str, prompt: str, *, max_new_tokens: int = 1, num_forks: int = 0) -> NewTable:
        """Request a table, which must be granted. `num_forks`: forks that are to be made of the sequence."""
        return self.allocate_all({name: prompt}, max_new_tokens=max_new_tokens, num_forks=num_forks)[0]

    def allocate_all(self, prompts: dict[str, str], *, max_new_tokens: int = 1, num_forks: int = 0) -> list[NewTable]:
        """Request the tables of several sequences in one call; all must be granted."""
        self._ask(prompts, SequenceState.LIVE, max_new_tokens, num_forks)
        return [self._new_table(name) for name in prompts]

    def allocate_in_vain(self, name: str, prompt: str) -> None:
        """Request a table for which there must be too few blocks."""
        self._ask({name: prompt}, SequenceState.WAITING)

    def allocate_too_early(self, name: str, prompt: str) -> int:
        """Request a table, for which the answer must be to wait for another sequence that computes its beginning; returns the
        position, in tokens, which that one has to reach."""
        (answer,) = self._ask({name: prompt}, SequenceState.PARKED)
        return int(answer.wait.position)

    def compute(self, name: str, generated: str = "", *, up_to: int | None = None) -> int:
        """Run steps until all tokens of a sequence are computed, or the first `up_to`, and these words are generated. The KV of the
        last of them is left to the next step. Returns how many tokens the manager has sealed once all is reported."""
        sequence, words = self._sequences[name], self.words.ids(generated)
        if words and sequence.num_computed_tokens == len(sequence.tokens):
            self.cache.add_token(sequence, words.pop(0))  # sampled by the last step
        self._run(sequence, up_to or len(sequence.tokens) + max(0, len(words) - 1), words)
        self._report()
        return self.session.sequences[name, 1].num_sealed * BLOCK_SIZE

    def fork(self, parent: str, name: str, word: str) -> None:
        """Make a fork of the parent's computed tokens, which goes on with another word, and report it."""
        num_tokens = self._sequences[parent].num_computed_tokens
        forked = self.cache.fork(self._sequences[parent], name, num_tokens=num_tokens)
        if forked is None:
            raise UnexpectedAnswer(f"{name} was to be a fork of {parent}; the reserve has too few blocks")
        self.cache.add_token(forked.sequence, *self.words.ids(word))
        self._sequences[name], self._prompt_lengths[name] = forked.sequence, num_tokens
        self._report()

    def free(self, *names: str) -> None:
        """End sequences whose prompts are computed by now, in one call."""
        for name in names:
            sequence = self._sequences[name]
            if sequence.num_computed_tokens < self._prompt_lengths[name]:
                self._run(sequence, self._prompt_lengths[name], [])
        for name in names:
            self.cache.free(self._sequences.pop(name))
        self._make_calls()

    def take_calls(self) -> tuple[str, ...]:
        """Return the calls since the last time, with their answers, each with a line for each of its items."""
        calls, self._calls = tuple(self._calls), []
        return calls

    def _ask(
        self, prompts: dict[str, str], expected: SequenceState, max_new_tokens: int = 1, num_forks: int = 0
    ) -> list[Any]:
        """Let these sequences wait for a table; returns the answers, after which all must be in the state that is `expected`."""
        for name, prompt in prompts.items():
            if name not in self._sequences:
                tokens = self.words.ids(prompt)
                sequence = CacheSequence(name, 1, _ROOT, tokens, max_new_tokens=max_new_tokens)
                sequence.num_forks_to_come = num_forks
                self._sequences[name], self._prompt_lengths[name] = sequence, len(tokens)
        sequences = [self._sequences[name] for name in prompts]
        num_before = len(self._calls)
        answers = self._make_calls(sequences)
        if any(sequence.state is not expected for sequence in sequences):
            raise UnexpectedAnswer(
                f"{' and '.join(prompts)} was to be {expected.value} after {'; '.join(self._calls[num_before:])}"
            )
        return answers

    def _run(self, sequence: CacheSequence, num_tokens: int, words: list[int]) -> None:
        """Run steps up to `num_tokens` computed tokens, which sample these words, and make the calls that are due meanwhile."""
        while (begin := sequence.num_computed_tokens) < num_tokens:
            end = begin + self.cache.chunk(sequence, min(CHUNK_TOKENS, num_tokens - begin))
            if end == begin or not self.cache.extend(sequence, end):
                raise UnexpectedAnswer(
                    f"{sequence.id.sequence_id} was to go on; no step can be run with so few tokens or blocks"
                )
            self.cache.begin_step([sequence])
            word = words.pop(0) if words and end == len(sequence.tokens) else None
            self.cache.end_step([Computed(sequence, end, word)], self._now)
            self._make_calls()

    def _report(self) -> None:
        self._now += _REPORT_SECONDS
        self._make_calls()

    def _make_calls(self, waiting: list[CacheSequence] | None = None) -> list[Any]:
        """Make the calls that are due, and return the results of their items."""
        results: list[Any] = []
        while (call := self.cache.next_call(lambda: waiting or [], self._now)) is not None:
            response = execute(self.manager, call.request)
            self._calls.append(in_words(call.request, response, self.layout))
            results += getattr(response, "results", [])
            self.cache.on_reply(call, response, self._now)
        for event in self.cache.take_events():
            if isinstance(event, events.SessionLost | events.GivenUp):
                raise UnexpectedAnswer(event.why)
        return results

    def _new_table(self, name: str) -> NewTable:
        has_others = len(self.layout) > 1
        return NewTable(
            tuple(self.table(name)),
            self._sequences[name].num_cached_tokens,
            tuple(self.named(name).values()) if has_others else (),
            self.scratch(name) if has_others else (),
            self.boundaries(name),
        )

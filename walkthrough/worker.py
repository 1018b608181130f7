"""The worker of a walkthrough, which drives a real CacheManager call by call, as an honest worker does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from kvpool.cache_service.core.block_pool import BlockPool, State
from kvpool.cache_service.core.groups.window import WindowTable
from kvpool.cache_service.core.integrity import Audit
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    TOKEN_BYTES,
    AllocateItem,
    AllocateOutcome,
    Appended,
    AppendItem,
    Boundary,
    ForkItem,
    Grant,
    Granted,
    GrantedTable,
    Layout,
    Registration,
    Reply,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    Uplink,
    Wait,
)
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.session import Session

from .layouts import ONE_GROUP, kind_of
from .sequence import Progress, WorkerSequence
from .words import Words

WORKER_ID: Final = "worker-0"

_ROOT: Final = Root("walkthrough")


class UnexpectedAnswer(Exception):
    """The core gave another answer than the story needs."""


class NewTable(NamedTuple):
    """The grant of a sequence."""

    blocks: tuple[int, ...]
    """Blocks of the first group, from table index 0 on."""
    num_cached_tokens: int
    named: tuple[int, ...] = ()
    """Blocks of the window or snapshot that is hit, in a second group with a window or a state."""
    scratch: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    """Boundaries of the sequence, in tokens."""


class Worker:
    """One worker. Each method is one call on the link."""

    def __init__(self, layout: Layout = ONE_GROUP) -> None:
        self.words = Words()
        self.manager = CacheManager(epoch=1)
        self.layout = layout
        registration = Registration(WORKER_ID, 1, 1, "in-process", "walkthrough", _ROOT.model_fingerprint, layout)
        self._session_number = self.manager.register(registration, now=0.0).session
        self._call_no = 0
        self._applied = 0
        self._reserves: list[list[ReservedBlock]] = [[] for _ in layout.groups]
        self._sequences: dict[str, WorkerSequence] = {}
        self._calls: list[str] = []

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
        return list(self.session.sequences[name, 1].tables[0])

    def window(self, name: str) -> WindowTable:
        """Return the blocks of a live sequence in the last group, which has a window or a state."""
        window = self.session.sequences[name, 1].tables[-1]
        assert isinstance(window, WindowTable)
        return window

    def blocks_in(self, state: State, among: Iterable[int] | None = None, *, group: int = 0) -> list[int]:
        """Return the blocks in a state, of all blocks or of those `among`, in their order."""
        pool = self.session.pools[group]
        return [block for block in (among or range(1, pool.num_blocks)) if pool.state(block) is state]

    def check(self) -> Audit:
        """Run the core's own audit of all its laws."""
        return self.manager.check()

    def take_calls(self) -> tuple[str, ...]:
        """Return the calls since the last time, with their answers, each as a line."""
        calls, self._calls = tuple(self._calls), []
        return calls

    # -- the calls

    def allocate(
        self, name: str, prompt: str, *, max_new_tokens: int = 1, reserve_wishes: tuple[int, ...] = ()
    ) -> NewTable:
        """Allocate one sequence, which must be granted. `reserve_wishes` are by group."""
        return self.allocate_all({name: prompt}, max_new_tokens=max_new_tokens, reserve_wishes=reserve_wishes)[0]

    def allocate_all(
        self, prompts: dict[str, str], *, max_new_tokens: int = 1, reserve_wishes: tuple[int, ...] = ()
    ) -> list[NewTable]:
        """Allocate several sequences in one call; all must be granted."""
        tables = []
        for name, outcome in zip(prompts, self._allocate(prompts, max_new_tokens, reserve_wishes), strict=True):
            if not isinstance(outcome, Granted):
                raise UnexpectedAnswer(f"allocate({name!r}) was to be granted; the core answered {outcome!r}")
            tokens = self.words.encode(prompts[name])
            self._sequences[name] = WorkerSequence(self.layout, tokens, max_new_tokens, outcome)
            tables.append(_new_table(outcome))
        return tables

    def allocate_in_vain(self, name: str, prompt: str) -> Refusal:
        """Allocate one sequence for which there must be too few blocks."""
        (outcome,) = self._allocate({name: prompt}, 1, ())
        if not isinstance(outcome, Refusal) or outcome.reason is not Reason.NO_BLOCKS:
            raise UnexpectedAnswer(f"allocate({name!r}) was to find too few blocks; the core answered {outcome!r}")
        return outcome

    def allocate_too_early(self, name: str, prompt: str) -> Wait:
        """Allocate one sequence, for which the answer must be to wait for another one that computes its beginning."""
        (outcome,) = self._allocate({name: prompt}, 1, ())
        if not isinstance(outcome, Wait):
            raise UnexpectedAnswer(f"allocate({name!r}) was to wait; the core answered {outcome!r}")
        return outcome

    def append(self, name: str, generated: str = "", *, up_to: int | None = None) -> Appended:
        """Report that all tokens so far, or the first `up_to`, are computed, and the `generated` words. New blocks come out of the
        reserves; windows and snapshots are named on the way."""
        progress = self._sequences[name].advance(self.words.encode(generated), up_to, self._reserves)
        update = _update(name, progress)
        (outcome,), reply = self.manager.append(self._uplink(), [AppendItem(update)])
        if not isinstance(outcome, Appended):
            raise UnexpectedAnswer(f"append({name!r}) was to be accepted; the core answered {outcome!r}")
        details = [f"num_computed_tokens={update.num_computed_tokens}", *self._block_details(progress)]
        if generated:
            details.insert(0, f"{len(update.tokens) // TOKEN_BYTES} new tokens")
        answer = f"{outcome.num_sealed_tokens} tokens sealed{self._apply(reply)}"
        self._calls.append(f'append("{name}", {", ".join(details)}) → {answer}')
        return outcome

    def fork(self, parent: str, name: str, generated: str) -> Appended:
        """Report a fork of the parent's computed tokens, which the manager must know; its first words are `generated`."""
        child, num_shared, progress = self._sequences[parent].fork(self.words.encode(generated), self._reserves[0])
        self._sequences[name] = child
        item = ForkItem(_key(parent), num_shared, _update(name, progress))
        (outcome,), reply = self.manager.fork(self._uplink(), [item])
        if not isinstance(outcome, Appended):
            raise UnexpectedAnswer(f"fork({name!r}) was to be accepted; the core answered {outcome!r}")
        details = [
            f"{num_shared} blocks shared",
            f"{len(progress.tokens) // TOKEN_BYTES} tokens after them",
            f"num_computed_tokens={progress.num_computed_tokens}",
            *self._block_details(progress),
        ]
        answer = f"{outcome.num_sealed_tokens} tokens sealed{self._apply(reply)}"
        self._calls.append(f'fork("{name}" of "{parent}", {", ".join(details)}) → {answer}')
        return outcome

    def free(self, *names: str) -> None:
        """End sequences in one call, which also reports their computed tokens, and names the last window or snapshot of each."""
        ended = {name: self._sequences.pop(name).end(self._reserves) for name in names}
        updates = [_update(name, progress) for name, progress in ended.items()]
        granted = self._apply(self.manager.free(self._uplink(), updates))
        for name, progress in ended.items():
            details = [f"num_computed_tokens={progress.num_computed_tokens}", *self._block_details(progress)]
            self._calls.append(f'free("{name}", {", ".join(details)}) → done{granted}')

    # -- the link

    def _allocate(
        self, prompts: dict[str, str], max_new_tokens: int, reserve_wishes: tuple[int, ...]
    ) -> list[AllocateOutcome]:
        items = [
            AllocateItem(_key(name), _ROOT, self.words.encode(prompt), max_new_tokens)
            for name, prompt in prompts.items()
        ]
        outcomes, reply = self.manager.allocate(self._uplink(reserve_wishes), items)
        granted = self._apply(reply)
        wishes = "" if max_new_tokens == 1 else f", up to {max_new_tokens} new"
        if reserve_wishes:
            wishes += f", reserve_wish={reserve_wishes if len(reserve_wishes) > 1 else reserve_wishes[0]}"
        for item, outcome in zip(items, outcomes, strict=True):
            num_tokens = len(item.tokens) // TOKEN_BYTES
            call = f'allocate("{item.key.sequence_id}", {num_tokens} tokens{wishes})'
            self._calls.append(f"{call} → {self._answer(outcome)}{granted}")
        return outcomes

    def _uplink(self, reserve_wishes: tuple[int, ...] = ()) -> Uplink:
        self._call_no += 1
        return Uplink(self._session_number, self._call_no, self._applied, reserve_wishes)

    def _apply(self, reply: Reply) -> str:
        """Apply the new entries of the downlink; returns a description of them."""
        granted: list[list[int]] = [[] for _ in self._reserves]
        description = ""
        for number, entry in reply.entries:
            if number > self._applied and isinstance(entry, Grant):
                self._reserves[entry.group] += [ReservedBlock(block, entry.generation) for block in entry.blocks]
                granted[entry.group] += entry.blocks
            elif number > self._applied and isinstance(entry, Boundary):
                self._sequences[entry.key.sequence_id].add_boundary(entry.num_tokens)
                description += f'; downlink: boundary("{entry.key.sequence_id}", {entry.num_tokens})'
            self._applied = max(self._applied, number)
        for group, blocks in enumerate(granted):
            of_group = f" of group {group}" if len(granted) > 1 else ""
            description += f"; the reserve{of_group} gets {blocks}" if blocks else ""
        return description

    # -- in words

    def _block_details(self, progress: Progress) -> list[str]:
        """Describe the blocks of an update."""
        details = []
        for group, of_group in enumerate(self.layout.groups):
            place = kind_of(of_group).value.lower()
            details += [f"block {block} as {place}[{index}]" for index, block, _ in progress.bound[group]]
            details += [f"block {reserved.block} as scratch" for reserved in progress.scratch[group]]
            details += [f"block {released.block} of the {place} released" for released in progress.released[group]]
        return details

    def _answer(self, outcome: AllocateOutcome) -> str:
        if isinstance(outcome, Refusal):
            return f"{outcome.reason.value}: {outcome.message}"
        if isinstance(outcome, Wait):
            return f"wait for {outcome.leader.sequence_id!r} up to position {outcome.position}"
        full, *others = outcome.tables
        parts = [f"table {list(full.blocks)}"]
        for group, table in zip(self.layout.groups[1:], others, strict=True):
            place = kind_of(group).value.lower()
            parts += [f"block {block} as {place}[{index}]" for index, block in enumerate(table.blocks, table.start)]
            parts.append(f"scratch {[reserved.block for reserved in table.scratch]}")
        parts.append(f"{outcome.num_cached_tokens} tokens cached")
        if outcome.boundaries:
            parts.append(f"boundaries {', '.join(map(str, outcome.boundaries))}")
        return ", ".join(parts)


def _key(name: str) -> SequenceKey:
    return SequenceKey(name, 1, 0)


def _update(name: str, progress: Progress) -> SequenceUpdate:
    return SequenceUpdate(_key(name), *progress)


def _new_table(granted: Granted) -> NewTable:
    full, *others = granted.tables
    window = others[0] if others else GrantedTable((), ())
    scratch = tuple(reserved.block for reserved in window.scratch)
    return NewTable(full.blocks, granted.num_cached_tokens, window.blocks, scratch, granted.boundaries)

"""A worker that registers with state, and reports what a test says. What an earlier manager granted it has the generation OLD."""

from __future__ import annotations

import itertools
from typing import Any

from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Appended,
    AppendItem,
    ContentRun,
    Granted,
    ReportedBlocks,
    ReportedSequence,
    ReportPart,
    ReservedBlock,
    Root,
    SequenceUpdate,
    TableEntry,
    Uplink,
    Wait,
)
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.session import Session
from tests.cache_service.core.lockstep import FINGERPRINT, key, refused, registration, token_bytes

SIZE, OLD = 4, 5
ROOT = Root(FINGERPRINT)


class Reporter:
    """Its blocks have four tokens. After each report every law of the manager is checked. `layout`: as in `registration`."""

    def __init__(
        self, manager: CacheManager | None = None, worker_id: str = "w", *, now: float = 0.0, **layout: Any
    ) -> None:
        self.manager = manager or CacheManager(3)
        introduction = registration(worker_id, **{"num_blocks": 17, "block_size": SIZE, **layout})
        introduction = introduction._replace(register_no=1 + round(now * 100), holds_state=True)
        self.number = self.manager.register(introduction, now).session
        self.call_no = itertools.count(1)

    @property
    def session(self) -> Session:
        return next(session for session in self.manager.sessions if session.number == self.number)

    def uplink(self) -> Uplink:
        return Uplink(self.number, next(self.call_no))

    def report(self, part: int = 0, *, last: bool = True, **content: Any) -> None:
        self.manager.report(self.uplink(), ReportPart(part, last, **content))
        self.check()

    def live(self, *idle: int, **content: Any) -> None:
        """What is in use, in one part, and these blocks of the first group that are idle."""
        self.report(0, last=False, live=True, **{"idle_blocks": (idle,), **content})

    def bad_report(self, part: int = 0, **content: Any) -> str:
        """Report something that cannot be: the session ends. Returns what the manager says."""
        refusal = refused(self.report, part, **content)
        assert refusal.reason is Reason.BAD_REPORT
        self.check()
        assert all(session.number != self.number for session in self.manager.sessions)
        return refusal.message

    def check(self) -> None:
        while self.manager.sweep():
            pass
        assert self.manager.check().violations == []

    def ask(self, name: str, tokens: Any, root: Root = ROOT, **wanted: Any) -> Granted | Wait | Refusal:
        """One Allocate of one sequence; `wanted`: the other fields of its item."""
        item = AllocateItem(key(name), root, token_bytes(tokens), **{"no_wait": True, **wanted})
        (outcome,), _ = self.manager.allocate(self.uplink(), [item])
        return outcome

    def allocate(self, name: str, tokens: Any, root: Root = ROOT, **wanted: Any) -> Granted:
        """The same, which is granted."""
        outcome = self.ask(name, tokens, root, **wanted)
        assert isinstance(outcome, Granted), outcome
        self.check()
        return outcome

    def append(self, update: SequenceUpdate) -> Appended:
        (outcome,), _ = self.manager.append(self.uplink(), [AppendItem(update)])
        assert isinstance(outcome, Appended), outcome
        return outcome

    def free(self, *names: str, num_computed_tokens: int = 0) -> None:
        updates = [SequenceUpdate(key(name), num_computed_tokens=num_computed_tokens) for name in names]
        self.manager.free(self.uplink(), updates)
        self.check()

    def cached(self, *tokens: int) -> int:
        """How many of these tokens are a hit, the most of all workers."""
        return max(one.num_cached_tokens for one in self.manager.route(ROOT, token_bytes([*tokens, 99])))

    def states(self, *blocks: int, group: int = 0) -> list[State]:
        return [self.session.pools[group].state(block) for block in blocks]


def chain(*groups: tuple[int, ...], parent: int = 0, first: int = 0, root: Root | None = ROOT) -> ContentRun:
    """Contents 4·first, 4·first + 1, …; `groups`: for each group the block that holds each of them, 0 for none."""
    length = len(groups[0])
    stated = [ReportedBlocks(g, blocks, tuple(OLD * (b > 0) for b in blocks)) for g, blocks in enumerate(groups)]
    tokens = token_bytes(range(first * SIZE, (first + length) * SIZE))
    return ContentRun(parent, None if parent else root, tokens, length, tuple(stated))


def run(*blocks: int, **where: Any) -> ContentRun:
    """A chain of contents in the first group."""
    return chain(blocks, **where)


def reserved(*blocks: int) -> tuple[ReservedBlock, ...]:
    return tuple(ReservedBlock(block, OLD) for block in blocks)


def entries(*blocks: int) -> tuple[TableEntry, ...]:
    """A table from index 0 on."""
    return tuple(TableEntry(index, block, OLD) for index, block in enumerate(blocks))


def sequence(
    name: str, num_tokens: int, computed: int, *blocks: int, cached: int = 0, attempt: int = 1
) -> ReportedSequence:
    """One that counts from 0, with a table in the first group."""
    tokens = token_bytes(range(num_tokens))
    return ReportedSequence(key(name, attempt), ROOT, tokens, computed, cached, (entries(*blocks),))

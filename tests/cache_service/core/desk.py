"""A worker for tests that tell one story: synchronous, honest, and every call of it goes to manager and model alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpool.cache_service.core.block_pool import BlockPool
from kvpool.cache_service.core.groups.window import WindowSessionGroup, WindowTable
from kvpool.cache_service.core.hashing import HashFunction
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Appended,
    AppendItem,
    BlockCounts,
    ForkItem,
    Grant,
    Granted,
    Limits,
    Reply,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
    Uplink,
    Wait,
)
from kvpool.cache_service.core.refusal import Refusal
from kvpool.cache_service.core.session import Session
from tests.cache_service.core.lockstep import FINGERPRINT, Lockstep, key, registration, token_bytes
from tests.cache_service.core.model import token_ids

ROOT = Root(FINGERPRINT)
EMPTY: Mapping[int, int] = {}


class Desk:
    """One worker. Sequences are named by their key or, in attempt 1 and round 0, by their id."""

    def __init__(
        self,
        num_blocks: int | tuple[int, ...] = 65,
        block_size: int = 4,
        *,
        worker_id: str = "w1",
        lockstep: Lockstep | None = None,
        hash_function: HashFunction | None = None,
        limits: Limits | None = None,
        windows: Sequence[tuple[int, int]] = (),
        grids: Sequence[int] = (),
        max_encoder_tokens: int = 0,
    ) -> None:
        self.lockstep = lockstep or Lockstep(hash_function, limits)
        self.manager = self.lockstep.manager
        introduction = registration(
            worker_id,
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            grids=grids,
            max_encoder_tokens=max_encoder_tokens,
        )
        number = self.lockstep.register(introduction)
        assert isinstance(number, int)
        self.number = number
        self.worker_id = worker_id
        self.block_size = block_size
        self.call_no = 0
        self.tokens: dict[SequenceKey, list[int]] = {}

    @property
    def session(self) -> Session:
        """The manager's side of it."""
        return self.manager.worker(self.worker_id)

    @property
    def pool(self) -> BlockPool:
        """The blocks of its first group."""
        return self.session.pools[0]

    @property
    def counts(self) -> BlockCounts:
        """The blocks of its first group by state."""
        return self.pool.counts()

    def free_list(self, group: int = 0) -> list[int]:
        """The free blocks of a group in the order in which they will be granted."""
        return list(self.session.pools[group].free_list())

    def table(self, name: str | SequenceKey) -> list[int]:
        """The block table of a live sequence."""
        named = _key(name)
        return list(self.session.sequences[named.sequence_id, named.attempt].tables[0])

    def window(self, name: str | SequenceKey, group: int | None = None) -> WindowTable:
        """What a live sequence has in a group with a window, by default the first."""
        named = _key(name)
        window = self.session.sequences[named.sequence_id, named.attempt].tables[self._window_group(group)]
        assert isinstance(window, WindowTable)
        return window

    def scratch(self, name: str | SequenceKey, group: int | None = None) -> list[int]:
        """The scratch blocks of a live sequence."""
        return list(self.window(name, group).scratch)

    def _window_group(self, group: int | None) -> int:
        return self.session.dependents[0].slot if group is None else group

    def uplink(
        self,
        *,
        downlink_ack: int = 0,
        reserve_wish: int | None = None,
        returned: Sequence[ReservedBlock] = (),
    ) -> Uplink:
        """The head of the next call."""
        self.call_no += 1
        wishes = () if reserve_wish is None else (reserve_wish,)
        return Uplink(self.number, self.call_no, downlink_ack, wishes, (tuple(returned),) if returned else ())

    def item(
        self,
        name: str | SequenceKey,
        tokens: Sequence[int],
        *,
        root: Root = ROOT,
        no_wait: bool = False,
        max_new_tokens: int = 1,
        max_cached_tokens: int | None = None,
        boundaries: tuple[int, ...] = (),
        retention_interval: int = 0,
        num_encoder_tokens: int = 0,
    ) -> AllocateItem:
        """One sequence of an Allocate."""
        self.tokens[_key(name)] = list(tokens)
        return AllocateItem(
            _key(name),
            root,
            token_bytes(tokens),
            max_new_tokens,
            no_wait,
            max_cached_tokens,
            boundaries,
            retention_interval,
            num_encoder_tokens,
        )

    def allocate_batch(self, *items: AllocateItem) -> list[Granted | Wait | Refusal]:
        """One Allocate of several sequences."""
        result = self.lockstep.allocate(self.uplink(), *items)
        assert not isinstance(result, Refusal), result
        return result[0]

    def allocate(self, name: str | SequenceKey, tokens: Sequence[int], **wanted: Any) -> Granted | Wait | Refusal:
        """One Allocate of one sequence; `wanted` as in `item`."""
        return self.allocate_batch(self.item(name, tokens, **wanted))[0]

    def refusal(self, name: str | SequenceKey, tokens: Sequence[int], **wanted: Any) -> Refusal:
        """An Allocate that the manager refuses; the model is not asked. `wanted` as in `item`."""
        (outcome,), _ = self.manager.allocate(self.uplink(), [self.item(name, tokens, **wanted)])
        assert isinstance(outcome, Refusal), outcome
        return outcome

    def grant(self, name: str | SequenceKey, tokens: Sequence[int], **wanted: Any) -> Granted:
        """An Allocate that is granted; `wanted` as in `item`."""
        outcome = self.allocate(name, tokens, **wanted)
        assert isinstance(outcome, Granted), outcome
        return outcome

    def report(
        self,
        name: str | SequenceKey,
        num_computed_tokens: int | None = None,
        *,
        new_tokens: Sequence[int] = (),
        bound: Sequence[TableEntry] = (),
        want_blocks: int = 0,
    ) -> Appended | Refusal:
        """One Append: `num_computed_tokens` are computed, by default all that are known before `new_tokens`."""
        named = _key(name)
        known = self.tokens[named]
        computed = len(known) if num_computed_tokens is None else num_computed_tokens
        update = SequenceUpdate(named, len(known), token_bytes(new_tokens), computed, (tuple(bound),) if bound else ())
        result = self.lockstep.append(self.uplink(), AppendItem(update, want_blocks))
        assert not isinstance(result, Refusal), result
        if isinstance(result[0][0], Appended):
            known += new_tokens
        return result[0][0]

    def fork_item(
        self,
        parent: str | SequenceKey,
        name: str | SequenceKey,
        num_shared_blocks: int,
        *,
        num_computed_tokens: int = 0,
        new_tokens: Sequence[int] = (),
        bound: Sequence[ReservedBlock] = (),
    ) -> ForkItem:
        """A fork that has `new_tokens` after the shared blocks and, from there on, `bound` in the first group."""
        start = num_shared_blocks * self.block_size
        self.tokens[_key(name)] = [*self.tokens[_key(parent)][:start], *new_tokens]
        entries = tuple(TableEntry(index, *reserved) for index, reserved in enumerate(bound, num_shared_blocks))
        computed = max(start, num_computed_tokens)
        update = SequenceUpdate(_key(name), start, token_bytes(new_tokens), computed, (entries,) if entries else ())
        return ForkItem(_key(parent), num_shared_blocks, update)

    def fork(self, *items: ForkItem) -> list[Appended | Refusal]:
        """One Fork."""
        result = self.lockstep.fork(self.uplink(), *items)
        assert not isinstance(result, Refusal), result
        return result[0]

    def statement(
        self,
        name: str | SequenceKey,
        num_computed_tokens: int,
        *,
        new_tokens: Sequence[int] = (),
        bound: Mapping[int, int] = EMPTY,
        scratch: Sequence[int] = (),
        released: Sequence[tuple[int, int]] = (),
        group: int | None = None,
    ) -> SequenceUpdate:
        """What is stated of a sequence in one group with a window, by default the first, as blocks and places; the generations are
        the present ones."""
        group = self._window_group(group)
        before, pool = ((),) * group, self.session.pools[group]
        return SequenceUpdate(
            _key(name),
            len(self.tokens[_key(name)]),
            token_bytes(new_tokens),
            num_computed_tokens,
            (*before, tuple(TableEntry(i, block, pool.generation(block)) for i, block in bound.items())),
            (*before, tuple(ReservedBlock(block, pool.generation(block)) for block in scratch)),
            (*before, tuple(TableEntry(i, block, pool.generation(block)) for i, block in released)),
        )

    def tell(self, update: SequenceUpdate) -> Appended | Refusal:
        """One Append of a statement."""
        result = self.lockstep.append(self.uplink(), AppendItem(update))
        assert not isinstance(result, Refusal), result
        if isinstance(result[0][0], Appended):
            self.tokens[update.key] += token_ids(update.tokens)
        return result[0][0]

    def encode(self, name: str | SequenceKey, num_computed_tokens: int = 0) -> Appended | Refusal:
        """One Append: the encoder has run for a sequence."""
        return self.tell(SequenceUpdate(_key(name), num_computed_tokens=num_computed_tokens, encoder_computed=True))

    def name(self, name: str | SequenceKey, boundary: int, **more: Any) -> dict[int, int]:
        """Compute up to a boundary, in blocks, and name the window there out of scratch, in each group with a window. `more`: as in
        `statement`, of the first. Returns what was named in the first, by table index."""
        named: list[dict[int, int]] = []
        for of in self.session.dependents:
            assert isinstance(of, WindowSessionGroup)
            window = self.window(name, of.slot)
            missing = [i for i in range(max(0, boundary - of.span), boundary) if i not in window.entries]
            bound = dict(zip(missing, self.scratch(name, of.slot), strict=False))
            extra = {} if named else more
            update = self.statement(name, boundary * self.block_size, bound=bound, group=of.slot, **extra)
            assert isinstance(self.tell(update), Appended)
            named.append(bound)
        return named[0]

    def refill(self, reserve_wish: int, group: int = 0) -> list[ReservedBlock]:
        """Ask for a reserve; returns the blocks of all grants not acknowledged."""
        uplink = self.uplink()._replace(reserve_wishes=(*(None,) * group, reserve_wish))
        result = self.lockstep.free(uplink)
        assert isinstance(result, Reply), result
        grants = [entry.entry for entry in result.entries if isinstance(entry.entry, Grant)]
        grants = [grant for grant in grants if grant.group == group]
        return [ReservedBlock(block, grant.generation) for grant in grants for block in grant.blocks]

    def free(self, name: str | SequenceKey, num_computed_tokens: int = 0) -> Reply:
        """One Free."""
        result = self.lockstep.free(self.uplink(), SequenceUpdate(_key(name), 0, b"", num_computed_tokens, ()))
        assert isinstance(result, Reply), result
        return result

    def leave(self, update: SequenceUpdate) -> Reply:
        """One Free with a statement."""
        result = self.lockstep.free(self.uplink(), update)
        assert isinstance(result, Reply), result
        return result

    def serve(self, name: str | SequenceKey, tokens: Sequence[int], *, root: Root = ROOT) -> int:
        """A whole request with max_tokens=1: granted, prefilled, freed. Returns the number of cached tokens."""
        granted = self.grant(name, tokens, root=root)
        self.free(name, len(tokens))
        return granted.num_cached_tokens


def _key(name: str | SequenceKey) -> SequenceKey:
    return key(name) if isinstance(name, str) else name

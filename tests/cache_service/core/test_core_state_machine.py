"""Laws under a hostile network: everything that workers can say, in any order, lost, late or twice.

Simulated workers keep real bookkeeping and write "KV" into a memory that remembers, slot by slot, the exact tokens it was
computed from. `Lockstep` compares the manager with the model after every call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvpool.cache_service.core.groups.state import StateSpec
from kvpool.cache_service.core.groups.unit import UnitSpec
from kvpool.cache_service.core.groups.window import WindowSpec
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Appended,
    AppendItem,
    Boundary,
    ForkItem,
    Grant,
    Granted,
    GroupSpec,
    Limits,
    Registration,
    Reply,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    Stop,
    TableEntry,
    Uplink,
    Wait,
)
from kvpool.cache_service.core.refusal import Reason
from tests.cache_service.core.contents_follower import ContentsFollower
from tests.cache_service.core.kinds import windows
from tests.cache_service.core.lockstep import (
    FINGERPRINT,
    Lockstep,
    Memory,
    registration,
    snapshot,
    successor,
    token_bytes,
    unit_content,
)
from tests.cache_service.core.model import Refused
from tests.cache_service.core.picture_follower import PictureFollower

LIMITS = Limits(
    max_sequences_per_session=5,
    max_downlink_entries=3,
    max_total_blocks=17,
    max_total_tokens=45,
    max_reserve_blocks=4,
    max_blocks_per_grant=2,
    max_boundaries=2,
)
OUT_OF_BLOCKS = (Reason.NO_BLOCKS, Reason.TOO_MANY_BLOCKS, Reason.TOO_MANY_TOKENS)
ROOTS = (Root(FINGERPRINT), Root(FINGERPRINT, tenant_salt="b"), Root(FINGERPRINT, input_digest=bytes(32)))
INPUTS = {bytes([number] * 32): 2 * number + 1 for number in range(4)}
"""Inputs of an encoder: how many tokens each digest is of."""
ROOTS_WITH_INPUT = tuple(Root(FINGERPRINT, "", salt, digest) for salt in ("", "", "b") for digest in INPUTS)

Outcome = Granted | Wait | Appended | Refused
Answer = tuple[Sequence[Outcome], Reply]


@dataclass(eq=False)
class SimWindow:
    """What a sequence has in a group with a window or a state, as its worker knows it."""

    window: int
    span: int
    block_size: int
    entries: dict[int, ReservedBlock] = field(default_factory=dict)
    """Named blocks by table index."""
    scratch: list[ReservedBlock] = field(default_factory=list)
    placed: dict[int, ReservedBlock] = field(default_factory=dict)
    """By table index: scratch blocks whose KV the sequence may still see."""
    bound: list[TableEntry] = field(default_factory=list)
    """What follows is not acknowledged yet. This: what was named."""
    taken: list[ReservedBlock] = field(default_factory=list)
    """Scratch out of the reserve."""
    released: list[TableEntry] = field(default_factory=list)
    forgotten: list[TableEntry] = field(default_factory=list)
    """Releases that are acknowledged."""

    def used(self) -> list[ReservedBlock]:
        """All its blocks."""
        return [*self.entries.values(), *self.scratch]

    def take(self, reserve: list[ReservedBlock]) -> ReservedBlock:
        """One more scratch block, out of the reserve."""
        block = reserve.pop(0)
        self.scratch.append(block)
        self.taken.append(block)
        return block

    def place_for(self, position: int) -> ReservedBlock | None:
        """A block of the ring that the token at a position can be written to, and no token from there on reads."""
        unplaced = [block for block in self.scratch if block not in self.placed.values()]
        if unplaced:
            return unplaced[0]
        oldest = min(self.placed, default=position)
        is_over = oldest < max(0, position - self.window + 1) // self.block_size
        return self.placed.pop(oldest) if is_over else None

    def can_name(self, boundary: int) -> bool:
        """Whether the window before a boundary, in blocks, is all there."""
        return all(
            index in self.placed or index in self.entries for index in range(max(0, boundary - self.span), boundary)
        )

    def name(self, boundary: int) -> None:
        """The window before a boundary, in blocks, is kept for others."""
        for index in range(max(0, boundary - self.span), boundary):
            if index not in self.entries:
                block = self.entries[index] = self.placed.pop(index)
                self.scratch.remove(block)
                if block in self.taken:
                    self.taken.remove(block)
                self.bound.append(TableEntry(index, *block))

    def release(self, index: int) -> None:
        """It needs an entry no more."""
        self.released.append(TableEntry(index, *self.entries.pop(index)))

    def release_scratch(self) -> None:
        """It needs one block less, other than the one that it is writing."""
        unwritten = [block for block in self.scratch if not self.placed or block != self.placed[max(self.placed)]]
        if unwritten:
            block = unwritten[-1]
            self.scratch.remove(block)
            self.placed = {index: other for index, other in self.placed.items() if other != block}
            self.released.append(TableEntry(0, *block))

    def acknowledge(self, update: SequenceUpdate, group: int) -> None:
        """The manager has taken in what an update states."""
        bound, taken, released = update.bound[group], update.scratch[group], update.released[group]
        self.bound = [entry for entry in self.bound if entry not in bound]
        self.taken = [block for block in self.taken if block not in taken]
        self.forgotten += [entry for entry in self.released if entry in released]
        self.released = [entry for entry in self.released if entry not in released]


@dataclass(eq=False)
class SimSequence:
    """A sequence as its worker knows it."""

    key: SequenceKey
    root: Root
    tokens: list[int]
    num_prompt_tokens: int
    uses_reserve: bool
    """Decodes out of the reserve; otherwise it asks for blocks with want_blocks."""
    tables: list[list[ReservedBlock]] = field(default_factory=list)
    """The block tables from index 0, by group; empty in groups with a window."""
    windows: list[SimWindow | None] = field(default_factory=list)
    """By group; None in groups without a window."""
    habit: int = 0
    """Of using windows: bits, as in `_name_windows`."""
    extras: tuple[tuple[int, ...], int] = ((), 0)
    """Boundaries and retention interval, in tokens, that it asks for."""
    asked: set[int] = field(default_factory=set)
    """In tokens: where windows are to be named."""
    granted: bool = False
    encoder_computed: bool = False
    encoder_reported: bool = False
    """The manager has acknowledged to know it."""
    num_computed: int = 0
    num_reported: int = 0
    """Tokens that the manager has acknowledged to know."""
    num_named: int = 0
    """Entries that the manager has acknowledged to have."""
    ending: bool = False
    """No step touches it any more; Free is sent until one is answered."""
    comes_back: bool = False
    """Preempted: returns with the next round after the Free."""
    parent: SimSequence | None = None
    """Whose fork it is, as long as the manager has not said that it knows."""
    num_shared: int = 0
    """Of a fork: blocks of its parent's tables that are its own too."""

    def used(self, group: int) -> list[ReservedBlock]:
        """All its blocks in a group."""
        window = self.windows[group]
        return self.tables[group] if window is None else window.used()

    def in_windows(self) -> list[tuple[int, SimWindow]]:
        """By group, those there are."""
        return [(group, window) for group, window in enumerate(self.windows) if window is not None]


@dataclass(eq=False)
class Message:
    """A mutating call on the wire. It can be delivered never, once or more often, early or late."""

    deliver: Callable[[], Answer | Reply | Refused]
    """A Free has no outcomes."""
    apply: Callable[[Sequence[Outcome]], None]
    uplink: Uplink


@dataclass(eq=False)
class SimWorker:
    """A worker process."""

    registration: Registration
    session: int = 0
    """0 while it is not registered."""
    last_call_no: int = 0
    downlink_ack: int = 0
    reserve_wish: int | None = None
    """Of each group."""
    sequences: list[SimSequence] = field(default_factory=list)

    @property
    def worker_id(self) -> str:
        """Its name."""
        return self.registration.worker_id

    @property
    def block_size(self) -> int:
        """Slots of its blocks."""
        return self.registration.layout.block_size

    @property
    def groups(self) -> range:
        """Their numbers."""
        return range(len(self.registration.layout.groups))

    @property
    def full_groups(self) -> list[int]:
        """Those that keep all of a sequence."""
        layout = self.registration.layout
        return [g for g in self.groups if not _sight(layout.groups[g], self.block_size) and g != self.unit_group]

    @property
    def unit_group(self) -> int | None:
        """The one with cross attention."""
        groups = self.registration.layout.groups
        return next((index for index in self.groups if isinstance(groups[index], UnitSpec)), None)

    def num_encoder_tokens(self, root: Root) -> int:
        """Of a sequence with this root."""
        return 0 if self.unit_group is None else INPUTS[root.input_digest]

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Holding nothing any more."""
        self.session = 0
        self.last_call_no = self.downlink_ack = 0
        self.reserve_wish = None
        self.reserves: list[list[ReservedBlock]] = [[] for _ in self.groups]
        self.returning: list[list[ReservedBlock]] = [[] for _ in self.groups]
        self.sequences = []

    def take_in(self, reply: Reply, uplink: Uplink | None = None) -> None:
        """Apply the downlink in order, once; a grant must not name what the worker uses."""
        if uplink is not None:
            for returning, returned in zip(self.returning, uplink.returned, strict=False):
                returning[:] = [entry for entry in returning if entry not in returned]
        for number, entry in reply.entries:
            if number <= self.downlink_ack:
                continue
            assert number == self.downlink_ack + 1, "the downlink has a hole"
            self.downlink_ack = number
            if isinstance(entry, Grant):
                self._take_grant(entry)
            elif isinstance(entry, Stop):
                self._stop(entry)
            elif isinstance(entry, Boundary):
                assert entry.num_tokens % self.block_size == 0
                for sequence in self.sequences:
                    if sequence.key == entry.key:
                        sequence.asked.add(entry.num_tokens)

    def _take_grant(self, grant: Grant) -> None:
        reserve = self.reserves[grant.group]
        for block in grant.blocks:
            assert block not in self.used(grant.group), f"block {block} was granted while a live table names it"
            assert block not in [entry.block for entry in reserve], f"block {block} was granted twice"
            reserve.append(ReservedBlock(block, grant.generation))

    def used(self, group: int) -> list[int]:
        """The group's blocks in tables of sequences that have not ended."""
        return [
            entry.block
            for sequence in self.sequences
            if sequence.granted and not sequence.ending
            for entry in sequence.used(group)
        ]

    def _stop(self, stop: Stop) -> None:
        for sequence in self.sequences:
            if sequence.key == stop.key:
                sequence.ending, sequence.comes_back = True, False


small = st.integers(0, 7)


def _prompt(length: int, flip: int) -> list[int]:
    """Zeros, but for a one at position `flip`, if there is one."""
    return [int(position == flip) for position in range(length)]


prompts = st.builds(
    _prompt, st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9, 10]), st.sampled_from([99, 99, 99, 0, 3, 4, 8])
)
steps = st.lists(
    st.builds(_prompt, st.sampled_from([0, 1, 4, 10, 10, 10]), st.sampled_from([99, 99, 0, 2])), min_size=1, max_size=5
)
names = st.sampled_from("abcdef")
attempts = st.sampled_from([1, 1, 1, 2, 3])
fates = st.sampled_from(["answered"] * 6 + ["request lost", "reply lost"])
habits = st.integers(0, 15)
EXTRAS: list[tuple[tuple[int, ...], int]] = [((), 0), ((), 0), ((3,), 0), ((4, 8), 0), ((), 2), ((), 4), ((6,), 3)]
extras = st.sampled_from(EXTRAS)


class GroupConfig(NamedTuple):
    """What a worker registers of a group."""

    num_blocks: int
    window: int = 0
    """Tokens; 0: none."""
    scratch: int = 0
    """Blocks of one sequence."""
    grid: int = 0
    """Blocks, of a state; 0: none."""
    has_inputs: bool = False
    """With cross attention."""


LAYOUTS = ("f", "ff", "fw", "fw", "wf", "w", "ww", "fww", "fs", "fs", "s", "fws", "fx", "fx", "wx", "fwx", "fsx")
"""A letter for each group: full attention, a window, a state, or cross attention."""


def _config(layout: str, block_size: int, groups: Sequence[tuple[int, int, int]]) -> tuple[list[GroupConfig], int]:
    """A worker's groups and block size. `groups`: blocks, tokens of the window, and scratch blocks beyond the least, which are also
    what the grid of a state is made of."""
    config: list[GroupConfig] = []
    for letter, (num_blocks, window, more) in zip(layout, groups, strict=False):
        window = min(window, 3 * block_size + 1)
        ring = -(-(window - 1) // block_size) + 1 + more
        of_letter = {
            "f": GroupConfig(num_blocks),
            "w": GroupConfig(num_blocks, window, ring),
            "s": GroupConfig(num_blocks, 0, 2 + more, 1 + more),
            "x": GroupConfig(num_blocks, has_inputs=True),
        }
        config.append(of_letter[letter])
    return config, block_size


def _sight(group: GroupSpec, block_size: int) -> int:
    """Tokens that layers see, 0: all. A state is treated as a window of one block, which is how the manager sees it: what a worker
    has in the blocks is its own affair."""
    if isinstance(group, StateSpec):
        return block_size + 1
    return group.window_tokens if isinstance(group, WindowSpec) else 0


configs_of_workers = st.lists(
    st.builds(
        _config,
        st.sampled_from(LAYOUTS),
        st.sampled_from([1, 2, 2, 4]),
        st.tuples(*[st.tuples(st.integers(4, 13), st.integers(2, 13), st.sampled_from([0, 0, 1, 2]))] * 3),
    ),
    min_size=2,
    max_size=3,
)


FORK_NONSENSE = ("unsealed", "parent", "round", "gap", "computed")
NONSENSE = ("gap", "token", "block", "generation", "computed", "round", "name", "table", "scratch", "groups")
DISTURBANCES = (
    *["old message"] * 4,
    *(f"tick {seconds}" for seconds in (0.2, 0.5, 0.9, 0.9, 3.0, 30.0)),
    *(f"keep-alive {fate}" for fate in ("answered", "answered", "reply lost")),
    *(f"append {kind}" for kind in NONSENSE),
    *(f"fork {kind}" for kind in FORK_NONSENSE),
    *(f"allocate {kind}" for kind in ("later", "earlier", "tenant")),
    *(f"fail {kind}" for kind in ("process", "link", "deregister", "manager", "epoch")),
    *["wild"] * 2,
    *["register late", "route", "route", "sweep", "sweep"],
)


class ManagerMachine(RuleBasedStateMachine):
    """Two or three workers, pools of 3 to 12 blocks, and token alphabets so small that prefixes collide all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.lockstep = Lockstep(limits=LIMITS)
        self.memory = self.lockstep.memory = Memory()
        self.lockstep.viewers.append(PictureFollower().compare)
        self.workers: list[SimWorker] = []
        self.old_messages: list[Message] = []
        self.num_served = 0

    @initialize(configs=configs_of_workers, seed=st.integers(0, 2**32))
    def start_workers(self, configs: list[tuple[list[GroupConfig], int]], seed: int) -> None:
        self.contents = ContentsFollower(seed)
        self.lockstep.viewers.append(self.contents.follow)
        for index, (groups, block_size) in enumerate(configs):
            introduction = registration(
                f"w{index}",
                num_blocks=tuple(group.num_blocks for group in groups),
                block_size=block_size,
                windows=[(group.window, group.scratch) for group in groups],
                grids=[group.grid for group in groups],
                max_encoder_tokens=8 if groups[-1].has_inputs else 0,
            )
            worker = SimWorker(introduction)
            self.workers.append(worker)
            self._register(worker, worker.registration)

    # -- helpers

    def _worker(self, index: int) -> SimWorker:
        """A worker with a session, which may be a stale one that it has not yet found out about."""
        worker = self.workers[index % len(self.workers)]
        if not worker.session:
            old = worker.registration
            self._register(worker, old._replace(register_no=old.register_no + 1))
        return worker

    def _register(self, worker: SimWorker, introduction: Registration) -> None:
        worker.forget()
        worker.registration = introduction
        session = self.lockstep.register(introduction)
        assert isinstance(session, int)
        worker.session = session

    def _uplink(self, worker: SimWorker) -> Uplink:
        worker.last_call_no += 1
        wishes = (worker.reserve_wish,) * len(worker.groups)
        returned = tuple(map(tuple, worker.returning))
        return Uplink(worker.session, worker.last_call_no, worker.downlink_ack, wishes, returned)

    def _send(self, worker: SimWorker, message: Message, fate: str) -> None:
        """Put a call on the wire. What is lost may still arrive later, and what arrived may arrive again."""
        self.old_messages = [*self.old_messages[-5:], message]
        if fate == "request lost":
            return
        answer = message.deliver()
        if fate == "reply lost":
            return
        if isinstance(answer, Refused):
            assert answer.reason is Reason.STALE_SESSION, answer
            worker.forget()
            return
        outcomes, reply = ((), answer) if isinstance(answer, Reply) else answer
        worker.take_in(reply, message.uplink)
        message.apply(outcomes)

    def _live(self, worker: SimWorker) -> list[SimSequence]:
        return [sequence for sequence in worker.sequences if sequence.granted and not sequence.ending]

    def _known(self, worker: SimWorker) -> list[SimSequence]:
        """Live ones that the manager has said that it knows."""
        return [sequence for sequence in self._live(worker) if sequence.parent is None]

    def _unstated(self, worker: SimWorker) -> list[SimSequence]:
        """Forks that the manager may not know of, oldest first."""
        return [sequence for sequence in worker.sequences if sequence.parent is not None]

    def _update(
        self, worker: SimWorker, sequence: SimSequence, back: int, hold_back: int, fewer: int = 0, again: bool = False
    ) -> SequenceUpdate:
        """The worker's state of a sequence, told from `back` tokens before what is known, short of the last `hold_back`. Telling
        less than is true is allowed: `fewer` entries and as many fewer computed tokens. `again`: all that windows have, and all
        that they have ever released."""
        start = max(0, sequence.num_reported - back)
        end = max(start, len(sequence.tokens) - hold_back)
        # What a fork shares may be a block that its parent took out of the reserve: it is not the fork's to name.
        first = max(sequence.num_shared if worker.full_groups else 0, sequence.num_named - back)
        last = max([len(sequence.tables[group]) for group in worker.full_groups if sequence.granted], default=0)
        if sequence.uses_reserve:
            last = max(first, last - fewer)
        computed = min(sequence.num_computed, max(end, sequence.num_reported)) - fewer
        if worker.full_groups:
            computed = min(computed, max(sequence.num_named, last) * worker.block_size)
        computed = max(0, computed)
        bound: list[tuple[TableEntry, ...]] = []
        scratch: list[tuple[ReservedBlock, ...]] = []
        released: list[tuple[TableEntry, ...]] = []
        for group in worker.groups if sequence.granted else ():
            table, window = sequence.tables[group], sequence.windows[group]
            entries = [TableEntry(index, *table[index]) for index in range(first, min(last, len(table)))]
            if group == worker.unit_group:
                entries = [TableEntry(index, *entry) for index, entry in enumerate(table)] if again else []
            scratch_blocks: list[ReservedBlock] = []
            gone: list[TableEntry] = []
            if window is not None:
                entries, scratch_blocks = list(window.bound), list(window.taken)
                if again:
                    pending = {entry.block for entry in entries}
                    entries += [TableEntry(i, *one) for i, one in window.entries.items() if one.block not in pending]
                    scratch_blocks += [one for one in window.scratch if one not in scratch_blocks]
                num_full = computed // worker.block_size
                held_back = [entry[1:] for entry in entries if entry.table_index >= num_full]
                entries = [entry for entry in entries if entry.table_index < num_full]
                gone = [entry for entry in window.released if entry[1:] not in held_back]
                if again:
                    gone = window.forgotten + gone
            bound.append(tuple(entries))
            scratch.append(tuple(scratch_blocks))
            released.append(tuple(gone))
        has_windows = sequence.granted and bool(sequence.in_windows())
        return SequenceUpdate(
            sequence.key,
            start,
            token_bytes(sequence.tokens[start:end]),
            computed,
            tuple(bound),
            tuple(scratch) if has_windows else (),
            tuple(released) if has_windows else (),
            sequence.encoder_computed and (again or not sequence.encoder_reported),
        )

    # -- a sequence's life

    @rule(
        who=small,
        wanted=st.lists(st.tuples(names, attempts, prompts, small, st.booleans(), habits, extras), max_size=3),
        no_wait=st.integers(0, 15),
        max_new=st.integers(0, 4),
        max_cached=st.sampled_from([None, None, None, 0, 2, 5]),
        fate=fates,
    )
    def allocate(
        self,
        who: int,
        wanted: list[tuple[str, int, list[int], int, bool, int, tuple[tuple[int, ...], int]]],
        no_wait: int,
        max_new: int,
        max_cached: int | None,
        fate: str,
    ) -> None:
        """New requests, those that were turned away or left unanswered, and now and then one that is granted already."""
        worker = self._worker(who)
        for name, attempt, prompt, root, uses_reserve, habit, extra in wanted:
            if not any((s.key.sequence_id, s.key.attempt) == (name, attempt) for s in worker.sequences):
                key = SequenceKey(name, attempt, 0)
                tenant = ROOTS[max(0, root - 5)]
                if worker.unit_group is not None:
                    tenant = ROOTS_WITH_INPUT[(root + attempt) % len(ROOTS_WITH_INPUT)]
                sequence = SimSequence(key, tenant, list(prompt), len(prompt), uses_reserve, habit=habit, extras=extra)
                worker.sequences.append(sequence)
        asking = [s for s in worker.sequences if not s.granted and not s.ending]
        if no_wait in (1, 2) or not asking:
            asking += self._known(worker)[:1]
        if not asking:
            return
        items = tuple(
            AllocateItem(
                sequence.key,
                sequence.root,
                token_bytes(sequence.tokens[: sequence.num_prompt_tokens]),
                max_new,
                bool(no_wait >> index & 1),
                max_cached,
                *sequence.extras,
                worker.num_encoder_tokens(sequence.root),
            )
            for index, sequence in enumerate(asking)
        )
        uplink = self._uplink(worker)

        def apply(outcomes: Sequence[Outcome]) -> None:
            for sequence, outcome in zip(asking, outcomes, strict=True):
                self._allocated(worker, sequence, outcome)

        self._send(worker, Message(lambda: self.lockstep.allocate(uplink, *items), apply, uplink), fate)

    def _allocated(self, worker: SimWorker, sequence: SimSequence, outcome: Outcome) -> None:
        if isinstance(outcome, Wait):
            leader = next(s for s in worker.sequences if s.key == outcome.leader)
            assert leader.key.sequence_id != sequence.key.sequence_id, "a wait on oneself"
            assert 0 < outcome.position < len(sequence.tokens) or not (outcome.position or leader.encoder_reported)
            assert outcome.position or leader.root == sequence.root
        elif isinstance(outcome, Refused):
            expected = {
                *OUT_OF_BLOCKS,
                Reason.NOT_TRIED,
                Reason.NEVER_FITS,
                Reason.TOO_MANY_SEQUENCES,
                Reason.STALE_ATTEMPT,
                Reason.SEQUENCE_ELSEWHERE,
            }
            assert outcome.reason in expected, outcome
            if outcome.reason in {Reason.STALE_ATTEMPT, Reason.SEQUENCE_ELSEWHERE, Reason.NEVER_FITS}:
                sequence.ending = True
        else:
            assert isinstance(outcome, Granted)
            tables = [list(map(ReservedBlock, table.blocks, table.generations)) for table in outcome.tables]
            if sequence.granted:
                for group in worker.full_groups:
                    table, before = tables[group], sequence.tables[group]
                    shorter = min(len(table), len(before))
                    assert table[:shorter] == before[:shorter], "a live table was changed"
                for group, window in sequence.in_windows():
                    known = [*window.used(), *(ReservedBlock(*entry[1:]) for entry in window.released)]
                    known += [ReservedBlock(*entry[1:]) for entry in window.bound]
                    said = [*(one for one in tables[group] if one.block), *outcome.tables[group].scratch]
                    assert set(said) <= set(known), "a repeated Allocate has handed something out"
                return
            self._check_hits(worker, sequence, outcome)
            sequence.granted = True
            dense = [*worker.full_groups, worker.unit_group]
            sequence.tables = [table if group in dense else [] for group, table in enumerate(tables)]
            sequence.encoder_computed = sequence.encoder_reported = outcome.encoder_cached
            sequence.windows = self._windows(worker, outcome)
            sequence.num_computed = outcome.num_cached_tokens
            sequence.num_reported = sequence.num_prompt_tokens
            sequence.num_named = max([len(sequence.tables[group]) for group in worker.full_groups], default=0)
            sequence.asked = set(outcome.boundaries)
            assert all(outcome.num_cached_tokens < one <= sequence.num_prompt_tokens for one in outcome.boundaries)
            groups = worker.registration.layout.groups
            grids = [worker.block_size, *(one.grid_tokens for one in groups if isinstance(one, StateSpec))]
            assert all(one % grid == 0 for one in outcome.boundaries for grid in grids)

    def _windows(self, worker: SimWorker, granted: Granted) -> list[SimWindow | None]:
        windows: list[SimWindow | None] = []
        for group, table in zip(worker.registration.layout.groups, granted.tables, strict=True):
            sight = _sight(group, worker.block_size)
            if not sight:
                windows.append(None)
                continue
            span = -(-(sight - 1) // worker.block_size)
            named = enumerate(map(ReservedBlock, table.blocks, table.generations), table.start)
            entries = {index: one for index, one in named if one.block}
            windows.append(SimWindow(sight, span, worker.block_size, entries, list(table.scratch)))
        return windows

    def _check_hits(self, worker: SimWorker, sequence: SimSequence, granted: Granted) -> None:
        """Exact hits, and at least one token left to compute; a fresh grant names nothing that the worker uses."""
        num_cached, size = granted.num_cached_tokens, worker.block_size
        assert num_cached % size == 0
        assert num_cached < sequence.num_prompt_tokens
        num_hits = num_cached // size
        if worker.unit_group is not None:
            self._check_unit(worker, sequence, granted)
        for group, table in enumerate(granted.tables):
            if group == worker.unit_group:
                continue
            window = _sight(worker.registration.layout.groups[group], size)
            first_seen = max(0, num_hits - -(-(window - 1) // size)) if window else 0
            assert table.start == (first_seen if table.blocks else 0)
            for index in range(first_seen, num_hits):
                content = sequence.root, tuple(sequence.tokens[: (index + 1) * size])
                self.memory.check_block(worker.worker_id, group, table.blocks[index - first_seen], size, content)
            fresh = {*table.blocks[num_hits - first_seen :], *(one.block for one in table.scratch)}
            used = worker.used(group) + [entry.block for entry in worker.reserves[group]]
            assert not fresh & set(used)

    def _check_unit(self, worker: SimWorker, sequence: SimSequence, granted: Granted) -> None:
        """It holds the encoder's input, or is fresh."""
        group = worker.unit_group
        assert group is not None
        blocks = granted.tables[group].blocks
        assert len(blocks) == -(-worker.num_encoder_tokens(sequence.root) // worker.block_size)
        if granted.encoder_cached:
            for index, block in enumerate(blocks):
                self.memory.check_unit(worker.worker_id, group, block, worker.block_size, sequence.root, index)
        else:
            used = worker.used(group) + [entry.block for entry in worker.reserves[group]]
            assert not set(blocks) & set(used)

    @rule(who=small, work=steps)
    def compute(self, who: int, work: list[list[int]]) -> None:
        """A step that nobody hears of yet: KV of known tokens, then of sampled ones, into the tables' own blocks."""
        worker = self._worker(who)
        for sequence, generated in zip(self._live(worker), work, strict=False):
            self._compute(worker, sequence, generated)

    def _compute(self, worker: SimWorker, sequence: SimSequence, generated: list[int]) -> None:
        for token in generated:
            position = sequence.num_computed
            index, slot = divmod(position, worker.block_size)
            if not self._make_room(worker, sequence, position):
                return
            if worker.unit_group is not None and not sequence.encoder_computed:
                self._run_encoder(worker, sequence, worker.unit_group)
            if position == len(sequence.tokens):
                sequence.tokens.append(token)
            self._write(worker, sequence, index, slot, tuple(sequence.tokens[: position + 1]))
            sequence.num_computed += 1
            if sequence.num_computed % worker.block_size == 0 and sequence.in_windows():
                self._name_windows(worker, sequence, ending=False)

    def _run_encoder(self, worker: SimWorker, sequence: SimSequence, group: int) -> None:
        for index, (block, _) in enumerate(sequence.tables[group]):
            for slot in range(worker.block_size):
                self._require_own(worker, group, sequence.tables[group][index])
                self.memory.write(worker.worker_id, group, block, slot, unit_content(sequence.root, index))
        sequence.encoder_computed = True

    def _make_room(self, worker: SimWorker, sequence: SimSequence, position: int) -> bool:
        """Whether each group has a place for the token at a position, if need be out of the reserve."""
        index = position // worker.block_size
        lacking = [group for group in worker.full_groups if index == len(sequence.tables[group])]
        for group, window in sequence.in_windows():
            block = window.placed.get(index) or window.place_for(position)
            if block is None:
                lacking.append(group)
            else:
                window.placed[index] = block
        if not (sequence.uses_reserve or not lacking) or not all(worker.reserves[group] for group in lacking):
            return False
        for group in lacking:
            growing = sequence.windows[group]
            if growing is None:
                sequence.tables[group].append(worker.reserves[group].pop(0))
            else:
                growing.placed[index] = growing.take(worker.reserves[group])
        return True

    def _name_windows(self, worker: SimWorker, sequence: SimSequence, *, ending: bool) -> None:
        """Name the windows at the end of what is computed, if that was asked for and the reserve replaces their blocks. Habits: 1:
        at every block; 2: at no block; 4: also without replacement; 8: to release at once what has left the window."""
        boundary = sequence.num_computed // worker.block_size
        windows = sequence.in_windows()
        wanted = ending or (sequence.num_computed in sequence.asked and not sequence.habit & 2) or sequence.habit & 1
        can = all(window.can_name(boundary) for _, window in windows)
        missing = {group: min(window.span, boundary) for group, window in windows}
        replaced = all(len(worker.reserves[group]) >= count for group, count in missing.items())
        if wanted and can and (ending or replaced or sequence.habit & 4):
            for group, window in windows:
                num_before = len(window.scratch)
                window.name(boundary)
                while replaced and not ending and len(window.scratch) < num_before:
                    window.take(worker.reserves[group])
        if sequence.habit & 8 and not ending:
            for _, window in windows:
                seen = max(0, sequence.num_computed - window.window + 1) // worker.block_size
                for index in [index for index in window.entries if index < seen]:
                    window.release(index)

    def _write(self, worker: SimWorker, sequence: SimSequence, index: int, slot: int, tokens: tuple[int, ...]) -> None:
        for group in worker.groups:
            if group == worker.unit_group:
                continue
            window = sequence.windows[group]
            entry = sequence.tables[group][index] if window is None else window.placed[index]
            self._require_own(worker, group, entry)
            self.memory.write(worker.worker_id, group, entry.block, slot, (sequence.root, tokens))

    def _require_own(self, worker: SimWorker, group: int, entry: ReservedBlock) -> None:
        """A block that is written is one that the manager has given to one sequence, and not sealed."""
        block, generation = entry
        for session in self.lockstep.manager.sessions:
            if session.number == worker.session:
                pool = session.pools[group]
                assert pool.node(block) is None, "a sealed block is written"
                assert pool.generation(block) == generation, "a block of a later grant is written"
                assert pool.ref_count(block) == 1 or pool.is_reserved(block, generation), "a block has two writers"

    @rule(
        who=small,
        work=steps,
        back=st.sampled_from([0, 0, 1, 3]),
        hold_back=st.sampled_from([0, 0, 1, 3]),
        fewer=st.sampled_from([0, 0, 1, 3]),
        more_blocks=st.integers(0, 3),
        turn=st.integers(0, 15),
        fate=fates,
    )
    def append(
        self,
        who: int,
        work: list[list[int]],
        back: int,
        hold_back: int,
        fewer: int,
        more_blocks: int,
        turn: int,
        fate: str,
    ) -> None:
        """A step and the report of it, or of less."""
        worker = self._worker(who)
        reporting = self._known(worker)[: len(work)]
        if not reporting:
            return
        for sequence, generated in zip(reporting, work, strict=False):
            self._compute(worker, sequence, generated)
        items: list[AppendItem] = []
        for sequence in reporting:
            self._turn(worker, sequence, turn)
            update = self._update(worker, sequence, back, hold_back, fewer, again=bool(turn & 1))
            longest = max([len(sequence.tables[group]) for group in worker.full_groups], default=0)
            items.append(AppendItem(update, 0 if sequence.uses_reserve else longest + more_blocks))
        uplink = self._uplink(worker)

        def apply(outcomes: Sequence[Outcome]) -> None:
            for sequence, item, outcome in zip(reporting, items, outcomes, strict=True):
                self._appended(worker, sequence, item, outcome)

        self._send(worker, Message(lambda: self.lockstep.append(uplink, *items), apply, uplink), fate)

    def _turn(self, worker: SimWorker, sequence: SimSequence, turn: int) -> None:
        """What a worker may do with windows at any time: release the oldest entry (2) or a scratch block (4), take one more (8)."""
        for group, window in sequence.in_windows():
            if turn & 2 and window.entries:
                window.release(min(window.entries))
            if turn & 4:
                window.release_scratch()
            if turn & 8 and worker.reserves[group]:
                window.take(worker.reserves[group])

    def _appended(self, worker: SimWorker, sequence: SimSequence, item: AppendItem, outcome: Outcome) -> None:
        if isinstance(outcome, Refused):
            assert outcome.reason in {*OUT_OF_BLOCKS, Reason.NEVER_FITS, Reason.STALE_ATTEMPT}, outcome
            if outcome.reason is Reason.STALE_ATTEMPT:
                sequence.ending = True
            return
        assert isinstance(outcome, Appended)
        update = item.update
        sequence.num_reported = max(sequence.num_reported, update.start + len(update.tokens) // 4)
        for group, entries in enumerate(update.bound):
            window = sequence.windows[group]
            if group == worker.unit_group:
                continue
            if window is None:
                sequence.num_named = max([sequence.num_named, *(entry.table_index + 1 for entry in entries)])
            else:
                window.acknowledge(update, group)
        sequence.encoder_reported = sequence.encoder_reported or update.encoder_computed
        for table, entries in zip(sequence.tables, outcome.new_entries, strict=bool(outcome.new_entries)):
            for index, block, generation in entries:
                if index == len(table):
                    table.append(ReservedBlock(block, generation))
                assert table[index] == ReservedBlock(block, generation), "a live table was changed"

    @rule(who=small, which=small, name=names, token=st.integers(0, 1), is_reported=st.booleans(), fate=fates)
    def fork(self, who: int, which: int, name: str, token: int, is_reported: bool, fate: str) -> None:
        """A sequence is made out of another one, between two steps; all that are not known yet are stated."""
        worker = self._worker(who)
        live = self._live(worker)
        if live:
            parent = live[which % len(live)]
            if is_reported and parent.parent is None:
                self.append(who, [[] for _ in live], 0, 0, 0, 0, 0, "answered")
            if not all(worker.reserves):
                self.plan_reserve(who, 3, 0)
                self.keep_alive(who, "answered")
            if worker.session and parent in self._live(worker):
                self._make_fork(worker, parent, f"{name}{which % 3}", token)
        stated = self._unstated(worker)
        if not stated or not worker.session:
            return
        items: list[ForkItem] = []
        for child in stated:
            assert child.parent is not None
            items.append(ForkItem(child.parent.key, child.num_shared, self._update(worker, child, 0, 0)))
        uplink = self._uplink(worker)

        def apply(outcomes: Sequence[Outcome]) -> None:
            for child, item, outcome in zip(stated, items, outcomes, strict=True):
                self._forked(worker, child, item, outcome)

        self._send(worker, Message(lambda: self.lockstep.fork(uplink, *items), apply, uplink), fate)

    def _make_fork(self, worker: SimWorker, parent: SimSequence, name: str, token: int) -> None:
        """Share full blocks, and copy the others into blocks of the reserve; nothing happens if there are too few."""
        key = SequenceKey(name, parent.key.attempt, 0)
        if not parent.num_computed or any(other.key[:2] == key[:2] for other in worker.sequences):
            return
        num_shared, rest = divmod(parent.num_computed, worker.block_size)
        seen: list[list[int]] = []
        for group, window in enumerate(parent.windows):
            if window is None:
                seen.append([num_shared] if rest and group != worker.unit_group else [])
            else:
                first = max(0, parent.num_computed - window.window + 1) // worker.block_size
                places = {**window.placed, **window.entries}
                seen.append([index for index in range(first, num_shared + bool(rest)) if index in places])
            if len(seen[group]) > len(worker.reserves[group]):
                return
        tokens = [*parent.tokens[: parent.num_computed], token]
        child = SimSequence(key, parent.root, tokens, max(1, num_shared * worker.block_size), True, habit=parent.habit)
        child.granted, child.parent, child.num_shared = True, parent, num_shared
        child.num_computed = parent.num_computed
        child.encoder_computed = child.encoder_reported = parent.encoder_computed
        child.num_reported = num_shared * worker.block_size
        child.num_named = num_shared if worker.full_groups else 0
        for group, window in enumerate(parent.windows):
            if window is None:
                copied = [worker.reserves[group].pop(0) for _ in seen[group]]
                sources = parent.tables[group][num_shared:]
                count = None if group == worker.unit_group else num_shared
                child.tables.append([*parent.tables[group][:count], *copied])
                child.windows.append(None)
            else:
                own = SimWindow(window.window, window.span, window.block_size)
                own.placed = {index: own.take(worker.reserves[group]) for index in seen[group]}
                copied = list(own.placed.values())
                sources = [{**window.placed, **window.entries}[index] for index in seen[group]]
                child.tables.append([])
                child.windows.append(own)
            for source, target in zip(sources, copied, strict=False):
                self._copy(worker, group, source.block, target.block)
        worker.sequences.append(child)

    def _copy(self, worker: SimWorker, group: int, source: int, target: int) -> None:
        for slot in range(worker.block_size):
            content = self.memory.read(worker.worker_id, group, source, slot)
            if content is not None:
                self.memory.write(worker.worker_id, group, target, slot, content)

    def _forked(self, worker: SimWorker, child: SimSequence, item: ForkItem, outcome: Outcome) -> None:
        if isinstance(outcome, Appended):
            child.parent = None
            self._appended(worker, child, AppendItem(item.update), outcome)
            return
        assert isinstance(outcome, Refused)
        assert outcome.reason in {
            Reason.GAP,
            Reason.UNKNOWN_SEQUENCE,
            Reason.STALE_ATTEMPT,
            Reason.SEQUENCE_ELSEWHERE,
            Reason.TOO_MANY_SEQUENCES,
            Reason.TOO_MANY_TOKENS,
        }, outcome
        if outcome.reason is not Reason.GAP:
            child.ending = True

    @rule(
        who=small,
        picks=st.lists(st.tuples(small, st.booleans()), max_size=3),
        back=st.sampled_from([0, 0, 1, 3]),
        lie=st.sampled_from([False, False, False, True]),
        fate=fates,
    )
    def free(self, who: int, picks: list[tuple[int, bool]], back: int, lie: bool, fate: str) -> None:
        """Sequences finish, are cancelled (also before they were granted), or are preempted and come back."""
        worker = self._worker(who)
        for which, preempt in picks:
            if worker.sequences:
                sequence = worker.sequences[which % len(worker.sequences)]
                sequence.comes_back = preempt and not sequence.ending
                sequence.ending = True
        # A fork that the manager may not know of has blocks that it pins for nobody but the parent.
        parents = [fork.parent for fork in self._unstated(worker)]
        leaving = [sequence for sequence in worker.sequences if sequence.ending and sequence not in parents]
        if not leaving:
            return
        for sequence in leaving:
            sequence.parent = None  # from now on it uses nothing, and is stated no more
            if sequence.granted and sequence.in_windows() and not sequence.habit & 2:
                self._name_windows(worker, sequence, ending=True)
        items = [self._update(worker, sequence, back, 0) for sequence in leaving]
        if lie:
            # Free never fails for a gap; the named blocks come back all the same.
            items = [update._replace(start=update.start + 50) for update in items]
        uplink = self._uplink(worker)

        def apply(outcomes: Sequence[Outcome]) -> None:
            for sequence in leaving:
                if not sequence.comes_back:
                    worker.sequences.remove(sequence)
                    continue
                sequence.key = sequence.key._replace(round=sequence.key.round + 1)
                sequence.tables, sequence.windows, sequence.granted = [], [], False
                sequence.ending = sequence.comes_back = False
                sequence.encoder_computed = sequence.encoder_reported = False
                sequence.num_computed = sequence.num_reported = sequence.num_named = sequence.num_shared = 0
                sequence.num_prompt_tokens = len(sequence.tokens)

        self._send(worker, Message(lambda: self.lockstep.free(uplink, *items), apply, uplink), fate)

    @rule(who=small, prompt=prompts, generated=st.integers(0, 3))
    def serve(self, who: int, prompt: list[int], generated: int) -> None:
        """A whole request at once: granted, computed, freed with all that it holds."""
        worker = self._worker(who)
        self.num_served += 1
        name = f"served{self.num_served}"
        self.allocate(who, [(name, 1, prompt, 0, True, generated & 1, ((), 0))], 15, 1, None, "answered")
        sequence = next((s for s in worker.sequences if s.key.sequence_id == name), None)
        if sequence is None:
            return
        if sequence.granted:
            self._compute(worker, sequence, [0] * (len(prompt) + generated))
        sequence.ending = True
        self.free(who, [], 0, False, "answered")

    # -- the reserve and the link

    @rule(who=small, wish=st.one_of(st.none(), st.integers(0, 5)), give_back=st.integers(0, 3))
    def plan_reserve(self, who: int, wish: int | None, give_back: int) -> None:
        worker = self._worker(who)
        worker.reserve_wish = wish
        for returning, reserve in zip(worker.returning, worker.reserves, strict=True):
            returning += reserve[:give_back]
            del reserve[:give_back]

    def keep_alive(self, who: int, fate: str) -> None:
        worker = self._worker(who)
        if fate == "request lost":
            return
        reply = self.lockstep.keep_alive(worker.session, worker.downlink_ack)
        if fate == "reply lost":
            return
        if isinstance(reply, Refused):
            worker.forget()
        else:
            worker.take_in(reply)

    def deliver_old_message(self, which: int) -> None:
        """A duplicate or a straggler. Once a later call was executed it must do nothing; its answer reaches nobody."""
        if not self.old_messages:
            return
        message = self.old_messages[which % len(self.old_messages)]
        self.lockstep.settle()
        before = snapshot(self.lockstep.manager)
        session = next((s for s in self.lockstep.manager.sessions if s.number == message.uplink.session), None)
        stale = session is None or message.uplink.call_no <= session.last_call_no
        answer = message.deliver()
        assert isinstance(answer, Refused) == stale
        if isinstance(answer, Refused):
            assert answer.reason is (Reason.STALE_SESSION if session is None else Reason.STALE_CALL)
            assert snapshot(self.lockstep.manager) == before

    def append_nonsense(self, who: int, which: int, kind: str) -> None:
        """A broken worker: the item is refused and changes nothing."""
        worker = self._worker(who)
        live = self._known(worker)
        if not live:
            return
        update = self._update(worker, live[which % len(live)], 0, 0)
        num_known = update.start + len(update.tokens) // 4
        spoilt = {
            "gap": update._replace(start=num_known + 1),
            "token": update._replace(start=0, tokens=token_bytes([9])),
            "block": update._replace(bound=((*update.bound[0], TableEntry(99, 1, 1)),)),
            "generation": update._replace(bound=(*update.bound[:-1], (TableEntry(0, 1, 3),))),
            "computed": update._replace(num_computed_tokens=num_known + 1),
            "round": update._replace(key=update.key._replace(round=update.key.round + 1)),
            "name": update._replace(key=SequenceKey("nobody", 1, 0)),
            "table": update,
            "scratch": update._replace(scratch=(*((),) * worker.groups[-1], (ReservedBlock(1, 3),))),
            "groups": update._replace(released=((),) * len(worker.groups) + ((TableEntry(0, 1, 1),),)),
        }[kind]
        want = 100 if kind == "table" else 0
        uplink = self._uplink(worker)._replace(returned=(), reserve_wishes=(None,))
        result = self.lockstep.append(uplink, AppendItem(spoilt, want))
        if isinstance(result, Refused):
            worker.forget()
            return
        assert isinstance(result[0][0], Refused)
        worker.take_in(result[1])

    def fork_nonsense(self, who: int, which: int, kind: str) -> None:
        """A broken worker states a fork that cannot be: it is refused and changes nothing."""
        worker = self._worker(who)
        known = self._known(worker)
        if not known:
            return
        parent = known[which % len(known)]
        num_full = parent.num_computed // worker.block_size
        update = SequenceUpdate(SequenceKey("nobody", 1, 0), num_full * worker.block_size)
        item = ForkItem(parent.key, num_full, update)
        spoilt = {
            "unsealed": item._replace(num_shared_blocks=num_full + 1),
            "parent": item._replace(parent=SequenceKey("nobody", 1, 0)),
            "round": item._replace(parent=parent.key._replace(round=parent.key.round + 1)),
            "gap": item._replace(update=update._replace(start=update.start + 1)),
            "computed": item._replace(update=update._replace(num_computed_tokens=update.start + 1)),
        }[kind]
        uplink = self._uplink(worker)._replace(returned=(), reserve_wishes=(None,))
        result = self.lockstep.fork(uplink, spoilt)
        if isinstance(result, Refused):
            worker.forget()
            return
        assert isinstance(result[0][0], Refused)
        worker.take_in(result[1])

    def wild(self, who: int, which: int) -> None:
        """A worker whose bookkeeping is wrong states anything of its windows. Manager and model agree on what that means; then it
        finds out, and registers again."""
        worker = self._worker(who)
        live = [s for s in self._known(worker) if s.in_windows()]
        session = next((one for one in self.lockstep.manager.sessions if one.number == worker.session), None)
        if not live or session is None:
            return
        draw = random.Random(which * 1_000_003 + session.last_call_no)
        for _ in range(3):
            sequence = draw.choice(live)
            known = session.sequences.get((sequence.key.sequence_id, sequence.key.attempt))
            if known is None or known.key != sequence.key or known.fenced:
                continue
            num_computed = draw.choice([0, known.num_computed_tokens])
            stated: list[list[list[TableEntry]]] = [[[] for _ in worker.groups] for _ in range(3)]
            for _ in range(draw.randint(1, 5)):
                group, _ = draw.choice(sequence.in_windows())
                pool = session.pools[group]
                own = [block for block in range(1, pool.num_blocks) if pool.state(block).name == "RESERVED"]
                window = windows(known)[group]
                own += [] if window is None else [*window.scratch, *window.entries.values()]
                block = draw.choice(own) if own and draw.random() < 0.8 else draw.randrange(pool.num_blocks + 1)
                generation = pool.generation(block) if draw.random() < 0.9 else draw.choice([0, 3])
                index = draw.randrange(max(1, known.num_sealed + (draw.random() < 0.1)))
                entry = TableEntry(index, block, generation)
                draw.choice(stated)[group].append(entry)
                if draw.random() < 0.3:
                    draw.choice(stated)[group].append(entry)
            bound, scratch, released = stated
            for group, entries in enumerate(bound):
                self._write_what_is_named(worker, sequence, group, entries)
            update = SequenceUpdate(
                sequence.key,
                0,
                b"",
                num_computed,
                tuple(map(tuple, bound)),
                tuple(tuple(ReservedBlock(*entry[1:]) for entry in entries) for entries in scratch),
                tuple(map(tuple, released)),
            )
            uplink = self._uplink(worker)._replace(returned=(), reserve_wishes=())
            if draw.random() < 0.8:
                self.lockstep.append(uplink, AppendItem(update))
            else:
                self.lockstep.free(uplink, update)
        self.fail(who, "link")

    def _write_what_is_named(
        self, worker: SimWorker, sequence: SimSequence, group: int, entries: Sequence[TableEntry]
    ) -> None:
        """Of each place the first block, so that it holds what it is said to hold if the manager believes it."""
        session = next(one for one in self.lockstep.manager.sessions if one.number == worker.session)
        pool, size = session.pools[group], worker.block_size
        written: set[int] = set()
        for index, block, generation in entries:
            if block in written or pool.node(block) is not None or pool.generation(block) != generation:
                continue
            written.add(block)
            for slot in range(size):
                tokens = tuple(sequence.tokens[: index * size + slot + 1])
                self.memory.write(worker.worker_id, group, block, slot, (sequence.root, tokens))

    def allocate_nonsense(self, who: int, which: int, later: bool, tenant: bool) -> None:
        """A live sequence under another round, or under another tenant's root, is never handed out."""
        worker = self._worker(who)
        live = self._known(worker)
        if not live:
            return
        sequence = live[which % len(live)]
        root = sequence.root._replace(tenant_salt="thief") if tenant else sequence.root
        round = sequence.key.round + (0 if tenant else 1 if later else -1)
        item = AllocateItem(
            sequence.key._replace(round=max(round, 0)),
            root,
            token_bytes(sequence.tokens[:1]),
            num_encoder_tokens=worker.num_encoder_tokens(root),
        )
        uplink = self._uplink(worker)._replace(returned=(), reserve_wishes=(None,))
        result = self.lockstep.allocate(uplink, item)
        if isinstance(result, Refused):
            worker.forget()
            return
        assert isinstance(result[0][0], Refused) or (not tenant and round <= 0)
        worker.take_in(result[1])

    # -- failures

    def fail(self, who: int, kind: str) -> None:
        """A worker comes back in a new process, or in the same, or leaves; or the manager loses everything."""
        worker = self._worker(who)
        old = worker.registration
        if kind == "process":
            self._register(worker, successor(old))
        elif kind == "link":
            self._register(worker, old._replace(register_no=old.register_no + 1))
        elif kind == "deregister":
            self.lockstep.deregister(worker.session)
            worker.forget()
        elif kind == "manager":
            self.lockstep.restart()
        elif kind == "epoch":
            # A worker has seen a larger epoch: the same sessions go on under larger stamps.
            self.lockstep.epoch += 1
            self.lockstep.manager.raise_epoch(self.lockstep.epoch)

    def register_late(self, who: int, back: int) -> None:
        """A Register that was overtaken, or one of an older process. It changes nothing while a newer process is known; after that
        the older one is the worker."""
        worker = self._worker(who)
        introduction = worker.registration
        if introduction.worker_id not in self.lockstep.model.newest:
            return
        late = introduction._replace(incarnation=introduction.incarnation - back)
        if back:
            late = late._replace(process_key=b"process %d" % late.incarnation, predecessor_key=b"")
        lives = any(session.registration == introduction for session in self.lockstep.model.sessions)
        result = self.lockstep.register(late)
        assert isinstance(result, Refused) or (back and not lives)
        if not isinstance(result, Refused):
            worker.forget()
            worker.registration, worker.session = late, result

    def tick(self, seconds: float) -> None:
        self.lockstep.now += seconds
        self.lockstep.tick()

    def sweep(self) -> None:
        self.lockstep.sweep()

    def route(self, root: Root, prompt: list[int]) -> None:
        self.lockstep.route(root, token_bytes(prompt))

    @rule(what=st.sampled_from(DISTURBANCES), who=small, which=small)
    def disturb(self, what: str, who: int, which: int) -> None:
        """One of everything that is not work. One rule, so that work stays the larger part of every history."""
        kind, _, detail = what.partition(" ")
        if kind == "tick":
            self.tick(float(detail))
        elif kind == "append":
            self.append_nonsense(who, which, detail)
        elif kind == "fork":
            self.fork_nonsense(who, which, detail)
        elif kind == "allocate":
            self.allocate_nonsense(who, which, later=detail == "later", tenant=detail == "tenant")
        elif kind == "fail":
            self.fail(who, detail)
        elif kind == "keep-alive":
            self.keep_alive(who, detail)
        elif kind == "register":
            self.register_late(who, which % 2)
        elif kind == "route":
            roots = (ROOTS + ROOTS_WITH_INPUT)[which % 2 :]
            self.route(roots[which % len(roots)], _prompt(9, which))
        elif kind == "old":
            self.deliver_old_message(which)
        elif kind == "wild":
            self.wild(who, which)
        else:
            self.sweep()

    def teardown(self) -> None:
        """When every worker has gone and the sweep has run, nothing is left."""
        for view in self.lockstep.viewers:
            view(self.lockstep.manager)
        for session in self.lockstep.manager.sessions:
            self.lockstep.deregister(session.number)
        while self.lockstep.sweep():
            pass
        assert self.lockstep.manager.num_prefix_nodes == 0
        assert self.lockstep.manager._tree.begin_walk(in_portions=False).step() is None


def explore(machine: type[ManagerMachine], num_histories: int) -> None:
    """Let hypothesis look for a history in which something breaks."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=60,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.usefixtures("every_hash")
def test_no_law_breaks_whatever_the_network_does() -> None:
    """After every step of any history the audit is clean, the state is the model's, and every hit is exact."""
    explore(ManagerMachine, 12)


@pytest.mark.usefixtures("every_hash")
@pytest.mark.parametrize("seed", range(4))
def test_no_law_breaks_in_a_long_history(seed: int) -> None:
    """The same machine, driven by a plain generator for hundreds of steps: deeper histories than hypothesis takes the time for."""
    LongHistory(ManagerMachine(), seed).run(250)


class LongHistory:
    """Draws steps as a busy cluster would take them: much work, some losses, few failures."""

    def __init__(self, machine: ManagerMachine, seed: int) -> None:
        self._machine = machine
        self._random = random.Random(seed)

    def run(self, num_steps: int) -> None:
        """Start two or three workers, take the steps, and let everybody go."""
        machine, rng = self._machine, self._random
        block_sizes = rng.choice([[1], [2], [2], [4], [1, 2, 4]])
        configs = [
            _config(
                rng.choice(LAYOUTS),
                rng.choice(block_sizes),
                [(rng.randint(4, 13), rng.randint(2, 13), rng.choice([0, 0, 1, 2])) for _ in range(3)],
            )
            for _ in range(rng.randint(2, 3))
        ]
        machine.start_workers(configs, seed=rng.getrandbits(32))
        actions = {
            self._allocate: 30,
            self._append: 40,
            self._free: 14,
            self._fork: 14,
            self._other: 20,
            self._nonsense: 6,
            self._failure: 2,
        }
        for _ in range(num_steps):
            rng.choices(list(actions), list(actions.values()))[0](rng.randrange(len(machine.workers)))
        machine.teardown()

    def _fate(self) -> str:
        return self._random.choices(["answered", "request lost", "reply lost"], [8, 1, 1])[0]

    def _steps(self) -> list[list[int]]:
        rng = self._random
        return [_prompt(rng.choice([0, 1, 3, 12]), rng.choice([99, 99, 1, 4])) for _ in range(5)]

    def _allocate(self, who: int) -> None:
        rng = self._random
        wanted = [
            (
                rng.choice("abcdefgh"),
                rng.choices([1, 2, 3], [8, 1, 1])[0],
                _prompt(rng.randint(1, 14), rng.choice([99, 99, 99, 0, 2, 5, 9])),
                rng.randrange(8),
                rng.random() < 0.5,
                rng.randrange(16),
                rng.choice(EXTRAS),
            )
            for _ in range(rng.randint(0, 3))
        ]
        cached = rng.choices([None, 0, 2, 5], [9, 1, 1, 1])[0]
        self._machine.allocate(who, wanted, rng.choice([0, 0, 0, 1, 5, 15]), rng.randint(0, 4), cached, self._fate())

    def _append(self, who: int) -> None:
        rng = self._random
        back, hold_back, fewer = (rng.choices([0, 1, 3], [6, 1, 1])[0] for _ in range(3))
        turn = rng.choice([0, 0, rng.randrange(16)])
        self._machine.append(who, self._steps(), back, hold_back, fewer, rng.randint(0, 2), turn, self._fate())

    def _free(self, who: int) -> None:
        rng = self._random
        picks = [(rng.randrange(8), rng.random() < 0.4) for _ in range(rng.randint(1, 2))]
        self._machine.free(who, picks, rng.choice([0, 0, 2]), rng.random() < 0.1, self._fate())

    def _fork(self, who: int) -> None:
        rng = self._random
        name, token, is_reported = rng.choice("abcdefgh"), rng.randrange(2), rng.random() < 0.7
        workers = self._machine.workers
        busy = [index for index, worker in enumerate(workers) if any(one.num_computed for one in worker.sequences)]
        self._machine.fork(rng.choice(busy or [who]), rng.randrange(8), name, token, is_reported, self._fate())

    def _other(self, who: int) -> None:
        rng = self._random
        machine = self._machine
        actions: list[Callable[[], None]] = [
            lambda: machine.compute(who, self._steps()),
            lambda: machine.plan_reserve(who, rng.choice([None, 0, 1, 3, 3]), rng.choice([0, 0, 0, 1, 2])),
            lambda: machine.plan_reserve(who, rng.choice([1, 2, 3]), 0),
            lambda: machine.keep_alive(who, self._fate()),
            lambda: machine.tick(rng.choice([0.2, 0.5, 0.9, 0.9])),
            lambda: machine.route(rng.choice(ROOTS + ROOTS_WITH_INPUT), _prompt(rng.randint(1, 12), 99)),
        ]
        rng.choice(actions)()

    def _nonsense(self, who: int) -> None:
        rng = self._random
        machine = self._machine
        actions: list[Callable[[], None]] = [
            lambda: machine.deliver_old_message(rng.randrange(8)),
            lambda: machine.append_nonsense(who, rng.randrange(8), rng.choice(NONSENSE)),
            lambda: machine.fork_nonsense(who, rng.randrange(8), rng.choice(FORK_NONSENSE)),
            lambda: machine.allocate_nonsense(who, rng.randrange(8), rng.random() < 0.5, rng.random() < 0.5),
            lambda: machine.register_late(who, rng.randrange(2)),
            lambda: machine.wild(who, rng.randrange(8)),
        ]
        rng.choice(actions)()

    def _failure(self, who: int) -> None:
        rng = self._random
        machine = self._machine
        kinds = ["process", "process", "link", "deregister", "manager", "epoch"]
        actions: list[Callable[[], None]] = [
            lambda: machine.fail(who, rng.choice(kinds)),
            lambda: machine.tick(rng.choice([3.0, 30.0])),
            machine.sweep,
        ]
        rng.choice(actions)()

"""Laws under a hostile network: everything that workers can say, right or wrong, in any order, late or twice.

Workers keep no books: what is right to say is read off the manager, and then it is said, or something else is. `Lockstep` compares
the manager with the model after every call. That workers which keep books, and lose messages, are never handed what they use, and
compute on nothing but their own, is shown in tests/simulation and tests/exhaustive with the real cache side of a worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.cache_service.core.block_pool import BlockPool, State
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.groups.group import SessionGroup
from kvpool.cache_service.core.groups.state import StateSpec
from kvpool.cache_service.core.groups.unit import UnitSpec
from kvpool.cache_service.core.groups.window import WindowSessionGroup, WindowSpec, WindowTable
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    ForkItem,
    GroupSpec,
    Layout,
    Limits,
    Registration,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
    Uplink,
)
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.sequence import Sequence
from kvpool.cache_service.core.session import Session
from tests.cache_service.core.contents_follower import ContentsFollower
from tests.cache_service.core.lockstep import (
    FINGERPRINT,
    HASH_FUNCTIONS,
    Lockstep,
    registration,
    snapshot,
    successor,
    token_bytes,
)
from tests.cache_service.core.picture_follower import PictureFollower

TIGHT = Limits(
    max_sequences_per_session=5,
    max_downlink_entries=3,
    max_total_blocks=40,
    max_total_tokens=110,
    max_reserve_blocks=4,
    max_blocks_per_grant=2,
    max_boundaries=2,
)
ROOMY = TIGHT._replace(
    max_sequences_per_session=9, max_downlink_entries=30, max_total_blocks=300, max_total_tokens=2000
)
ROOTS = (*[Root(FINGERPRINT)] * 4, Root(FINGERPRINT, tenant_salt="b"), Root(FINGERPRINT, input_digest=bytes(32)))
INPUTS = {bytes([number] * 32): 2 * number + 1 for number in range(3)}
"""Inputs of an encoder: how many tokens each digest is of."""
ROOTS_WITH_INPUT = tuple(Root(FINGERPRINT, "", salt, digest) for salt in ("", "", "b") for digest in INPUTS)
LAYOUTS = ("f", "f", "ff", "fw", "fw", "wf", "w", "ww", "fww", "fs", "fs", "s", "fws", "fx", "fx", "wx", "fwx", "fsx")
"""A letter for each group: full attention, a window, a state, or cross attention."""
EXTRAS: list[tuple[tuple[int, ...], int]] = [((), 0)] * 3 + [((3,), 0), ((4, 8), 0), ((), 2), ((), 4), ((6,), 3)]
"""Boundaries and retention intervals, in tokens, that sequences ask for."""


def _layout(letters: str, block_size: int, groups: list[tuple[int, int, int]]) -> Layout:
    """What a worker registers. `groups`: blocks, tokens of the window, and scratch blocks beyond the least, which are also what the
    grid of a state is made of."""
    specs: list[GroupSpec] = []
    for letter, (num_blocks, window, more) in zip(letters, groups, strict=False):
        window = min(window, 3 * block_size + 1)
        ring = -(-(window - 1) // block_size) + 1 + more
        of_letter: dict[str, GroupSpec] = {
            "f": DenseSpec(num_blocks),
            "w": WindowSpec(num_blocks, window_tokens=window, ring_blocks=ring),
            "s": StateSpec(num_blocks, grid_tokens=(1 + more) * block_size, scratch_blocks=2 + more),
            "x": UnitSpec(num_blocks, max_encoder_tokens=8),
        }
        specs.append(of_letter[letter])
    return Layout(block_size, tuple(specs))


def _reserved(pool: BlockPool) -> list[ReservedBlock]:
    blocks = [block for block in range(1, pool.num_blocks) if pool.state(block) is State.RESERVED]
    return [ReservedBlock(block, pool.generation(block)) for block in blocks]


def _entry(group: SessionGroup, index: int, block: int) -> TableEntry:
    return TableEntry(index, block, group.pool.generation(block))


Statement = list[list[TableEntry]]
"""Entries by group."""


class ManagerMachine:
    """Two or three workers, and token alphabets so small that prefixes collide all the time. `draw` has a seed, or is hypothesis's,
    which looks for a shorter history that breaks the same."""

    def __init__(self, draw: random.Random, limits: Limits) -> None:
        self.draw = draw
        self.lockstep = Lockstep(limits=limits)
        self.lockstep.viewers += [PictureFollower().compare, ContentsFollower(draw.getrandbits(32)).follow]
        self.introductions: list[Registration] = []
        self.late: list[tuple[Uplink, Callable[[], object]]] = []
        """Calls that may come, or come again."""
        self.num_lives = 0

    def run(self, num_steps: int) -> None:
        """Start the workers, take the steps, and let everybody go: nothing is left then."""
        draw = self.draw
        block_sizes = draw.choice([[1], [2], [2], [4], [1, 2, 4]])
        num_slots = draw.choice([[16, 20, 30], [40, 60, 90]])
        for number in range(draw.randint(2, 3)):
            size = draw.choice(block_sizes)
            groups = [
                (2 + draw.choice(num_slots) // size, draw.randint(2, 13), draw.choice([0, 0, 1, 2])) for _ in range(3)
            ]
            layout = _layout(draw.choice(LAYOUTS), size, groups)
            self.introductions.append(registration(f"w{number}")._replace(layout=layout))
        steps = [self.allocate] * 14 + [self.append] * 16 + [self.free] * 14 + [self.fork] * 5 + [self.live] * 14
        steps += [self.keep_alive] * 3 + [self.route] * 3 + [self.tick] * 3 + [self.come_late] * 3 + [self.fail]
        for _ in range(num_steps):
            draw.choice(steps)(self._session())
        for session in self.lockstep.manager.sessions:
            self.lockstep.deregister(session.number)
        while self.lockstep.sweep():
            pass
        assert self.lockstep.manager.num_prefix_nodes == 0
        assert self.lockstep.manager._tree.begin_walk(in_portions=False).step() is None

    # -- what is said

    def _session(self) -> Session:
        """Of one of the workers, which registers if it has none."""
        number = self.draw.randrange(len(self.introductions))
        known = self.introductions[number]
        for session in self.lockstep.manager.sessions:
            if session.worker_id == known.worker_id:
                return session
        self._register(number, known._replace(register_no=known.register_no + 1))
        return self.lockstep.manager.worker(known.worker_id)

    def _register(self, number: int, introduction: Registration) -> None:
        assert isinstance(self.lockstep.register(introduction), int)
        self.introductions[number] = introduction

    def _chance(self, one_in: int) -> bool:
        return self.draw.randrange(one_in) == 0

    def _tokens(self, most: int) -> list[int]:
        """Zeros; now and then one of them is a one."""
        flip = self.draw.choice([99] * 6 + [0, 2, 5, 9])
        return [int(position == flip) for position in range(self.draw.choice([most, self.draw.randint(0, most)]))]

    def _ack(self, session: Session) -> int:
        last = session.downlink.last_number
        return self.draw.choice([last, last, max(0, last - 1)])

    def _send(
        self, session: Session, spare: list[list[ReservedBlock]], call: Callable[..., object], *items: object
    ) -> None:
        """Make a call, at once or later, which gives some of what is spare back. It is not refused as a whole."""
        draw = self.draw
        wishes = tuple(draw.choice([None, None, None, 0, 1, 3, 5]) for _ in session.pools)
        returned = tuple(tuple(blocks[: draw.choice([0, 0, 0, 1, 3])]) for blocks in spare)
        call_no = session.last_call_no + draw.choice([1, 1, 1, 2])
        uplink = Uplink(session.number, call_no, self._ack(session), wishes, returned)
        deliver = partial(call, uplink, *items)
        self.late = [*self.late[-5:], (uplink, deliver)]
        if not self._chance(8):
            assert not isinstance(deliver(), Refusal)

    def _some(self, session: Session) -> list[Sequence]:
        living = list(session.sequences.values())
        return self.draw.sample(living, min(len(living), self.draw.randint(1, 3)))

    def _spare(self, session: Session) -> list[list[ReservedBlock]]:
        """Blocks of the reserve by group, each to be used once in a call."""
        return [_reserved(pool) for pool in session.pools]

    def _item(self, session: Session, name: str = "") -> AllocateItem:
        draw = self.draw
        has_input = not all(group.holds_nodes for group in session.by_slot)
        root = draw.choice(ROOTS_WITH_INPUT if has_input else ROOTS)
        tokens = token_bytes([0, *self._tokens(13)])
        name = name or draw.choice(["", session.worker_id, session.worker_id]) + draw.choice("abcdefg")
        key = SequenceKey(name, draw.choice([1] * 12 + [2, 3]), draw.choice([0] * 8 + [1, 2]))
        live = session.sequences.get(key[:2])
        if live is not None and not self._chance(4):
            root, tokens = live.root.key[0], bytes(live.tokens[: 4 * draw.randint(1, 9)])
        return AllocateItem(
            key,
            root,
            tokens,
            draw.randint(0, 4),
            bool(name) and self._chance(3),
            draw.choice([None] * 9 + [0, 2, 5]),
            *draw.choice(EXTRAS),
            INPUTS[root.input_digest] if has_input else 0,
        )

    def _update(self, session: Session, sequence: Sequence, spare: list[list[ReservedBlock]]) -> SequenceUpdate:
        """More tokens, computed as far as there is room, some of what is known already once more, and turns of the windows."""
        draw, size = self.draw, session.block_size
        num_known = len(sequence.tokens) // 4
        start = max(0, num_known - draw.choice([0, 0, 0, 1, 4]))
        tokens = bytes(sequence.tokens[4 * start :]) + token_bytes(self._tokens(draw.choice([0, 1, 3, 8])))
        most = start + len(tokens) // 4
        bound: Statement = [[] for _ in session.by_slot]
        scratch: Statement = [[] for _ in session.by_slot]
        released: Statement = [[] for _ in session.by_slot]
        for group in session.by_slot:
            table = sequence.tables[group.slot]
            if isinstance(group, WindowSessionGroup):
                continue
            first = 0 if self._chance(6) else len(table)
            bound[group.slot] = [_entry(group, index, table[index]) for index in range(first, len(table))]
            if group.holds_nodes:
                while (index := len(table) + len(bound[group.slot]) - (len(table) - first)) * size < most:
                    if not spare[group.slot]:
                        break
                    bound[group.slot].append(TableEntry(index, *spare[group.slot].pop(0)))
                most = min(most, index * size)
        named = [boundary * size for boundary in sequence.boundaries if boundary * size <= most]
        num_computed = max(0, draw.choice([*named[:1] * 4, most, most, most - 1, sequence.num_computed_tokens]))
        for group in session.by_slot:
            if isinstance(group, WindowSessionGroup):
                stated = bound[group.slot], scratch[group.slot], released[group.slot]
                self._turn(group, sequence, max(num_computed, sequence.num_computed_tokens) // size, spare, *stated)
        is_encoded = not all(group.holds_nodes for group in session.by_slot) and (
            self._chance(4) or (num_computed > sequence.num_cached_tokens and not sequence.encoder_computed)
        )
        update = SequenceUpdate(
            sequence.key,
            start,
            tokens,
            num_computed,
            tuple(map(tuple, bound)),
            tuple(tuple(ReservedBlock(*entry[1:]) for entry in entries) for entries in scratch) if any(scratch) else (),
            tuple(map(tuple, released)) if any(released) else (),
            is_encoded,
        )
        return self._spoilt(session, update) if self._chance(8) else update

    def _turn(
        self,
        group: WindowSessionGroup,
        sequence: Sequence,
        boundary: int,
        spare: list[list[ReservedBlock]],
        bound: list[TableEntry],
        scratch: list[TableEntry],
        released: list[TableEntry],
    ) -> None:
        """Name the window before a boundary, take scratch out of the reserve, release blocks; and what was said before."""
        draw = self.draw
        table = sequence.tables[group.slot]
        assert isinstance(table, WindowTable)
        own = [ReservedBlock(block, group.pool.generation(block)) for block in table.scratch]
        if self._chance(3):
            scratch += [TableEntry(0, *block) for block in spare[group.slot][: draw.randint(1, 2)]]
            del spare[group.slot][: len(scratch)]
        missing = [i for i in range(max(0, boundary - group.span), boundary) if i not in table.entries]
        if self._chance(2) and len(missing) <= len(own) + len(spare[group.slot]):
            own += spare[group.slot]
            spare[group.slot] = []
            bound += [TableEntry(index, *own.pop(0)) for index in missing]
        if self._chance(8):
            bound += [_entry(group, index, block) for index, block in table.entries.items()]
        if table.entries and self._chance(3):
            index = draw.choice(sorted(table.entries))
            released.append(_entry(group, index, table.entries[index]))
        if own and self._chance(6):
            released.append(TableEntry(0, *draw.choice(own)))

    def _spoilt(self, session: Session, update: SequenceUpdate) -> SequenceUpdate:
        """What a worker says whose books are wrong: it is refused, or ignored, as the model says."""
        draw, key = self.draw, update.key
        group = draw.choice(session.by_slot)
        own = [one.block for one in _reserved(group.pool)] + [
            block for one in self._some(session) for block in group.blocks(one)
        ]
        block = draw.choice(own) if own and draw.randrange(4) else draw.randrange(group.pool.num_blocks + 1)
        generation = group.pool.generation(block) if draw.randrange(4) else draw.choice([0, 3])
        entry = TableEntry(draw.randrange(9), block, generation)
        before = ((),) * group.slot
        return draw.choice(
            [
                update._replace(start=update.start + 9),
                update._replace(start=0, tokens=token_bytes([9])),
                update._replace(num_computed_tokens=update.num_computed_tokens + 9),
                update._replace(key=key._replace(round=max(0, key.round + draw.choice([1, -1])))),
                update._replace(key=key._replace(sequence_id="nobody")),
                update._replace(encoder_computed=not update.encoder_computed),
                update._replace(released=((),) * len(session.by_slot) + ((entry,),)),
                *[update._replace(bound=(*before, (entry, entry)[: draw.randint(1, 2)]))] * 3,
                *[update._replace(scratch=(*before, (ReservedBlock(*entry[1:]),)))] * 2,
                *[update._replace(released=(*before, (entry,)))] * 2,
            ]
        )

    # -- steps

    def allocate(self, session: Session) -> None:
        """Some are new, some live already, in this round or another one."""
        self._send(
            session,
            self._spare(session),
            self.lockstep.allocate,
            *(self._item(session) for _ in range(self.draw.randint(0, 3))),
        )

    def append(self, session: Session) -> None:
        spare = self._spare(session)
        items = []
        for sequence in self._some(session):
            longest = max([len(group.blocks(sequence)) for group in session.by_slot])
            wanted = self.draw.choice([0, 0, 0, longest + self.draw.randint(0, 2), 100 if self._chance(9) else 0])
            items.append(AppendItem(self._update(session, sequence, spare), wanted))
        self._send(session, spare, self.lockstep.append, *items)

    def fork(self, session: Session) -> None:
        """It shares what its parent has sealed, has blocks of its own for the rest; now and then it is a fork that cannot be."""
        draw, spare, size = self.draw, self._spare(session), session.block_size
        items = []
        for parent in self._some(session):
            num_shared = max(0, parent.num_sealed + (draw.choice([-1, 1, 5]) if self._chance(8) else 0))
            start = num_shared * size
            tokens = bytes(parent.tokens[4 * start :]) + token_bytes(self._tokens(2))
            bound: Statement = [[] for _ in session.by_slot]
            scratch: list[list[ReservedBlock]] = [[] for _ in session.by_slot]
            num_computed = start + len(tokens) // 4 - self._chance(2)
            for group in session.by_slot:
                blocks = spare[group.slot]
                count = -(-len(tokens) // (4 * size))
                if isinstance(group, WindowSessionGroup):
                    scratch[group.slot] = blocks[: group.span + 1]
                    del blocks[: group.span + 1]
                elif group.holds_nodes:
                    bound[group.slot] = [TableEntry(num_shared + i, *block) for i, block in enumerate(blocks[:count])]
                    num_computed = min(num_computed, start + len(bound[group.slot]) * size)
                    del blocks[:count]
            key = SequenceKey(session.worker_id + draw.choice("hijk"), parent.key.attempt, 0)
            update = SequenceUpdate(
                key, start, tokens, max(0, num_computed), tuple(map(tuple, bound)), tuple(map(tuple, scratch))
            )
            if not any(scratch):
                update = update._replace(scratch=())
            item = ForkItem(
                parent.key, max(0, num_shared), self._spoilt(session, update) if self._chance(8) else update
            )
            items.append(item._replace(parent=key) if self._chance(20) else item)
        self._send(session, spare, self.lockstep.fork, *items)

    def free(self, session: Session) -> None:
        """Sequences end, with all that they hold; one that never was, or is of another round, does too."""
        spare = self._spare(session)
        updates = [self._update(session, sequence, spare) for sequence in self._some(session)]
        updates += [SequenceUpdate(SequenceKey("nobody", 1, 0))] * self._chance(6)
        self._send(session, spare, self.lockstep.free, *updates)

    def live(self, session: Session) -> None:
        """A whole life in three calls, without a pause: what stays is cache."""
        self.num_lives += 1
        item = self._item(session, f"life {self.num_lives}")
        self._send(session, self._spare(session), self.lockstep.allocate, item)
        for call in (lambda uplink, update: self.lockstep.append(uplink, AppendItem(update)), self.lockstep.free):
            sequence, spare = session.sequences.get(item.key[:2]), self._spare(session)
            if sequence is not None:
                update = self._update(session, sequence, spare)
                self._send(session, spare, call, update)

    def keep_alive(self, session: Session) -> None:
        self.lockstep.keep_alive(session.number, self._ack(session))

    def route(self, session: Session) -> None:
        self.lockstep.route(self.draw.choice(ROOTS + ROOTS_WITH_INPUT), token_bytes([0, *self._tokens(11)]))

    def tick(self, session: Session) -> None:
        self.lockstep.now += self.draw.choice([0.2, 0.5, 0.9, 0.9] * 3 + [3.0, 30.0])
        self.lockstep.tick()
        self.lockstep.sweep()

    def come_late(self, session: Session) -> None:
        """A call arrives late, or again. Once a later call was executed it does nothing."""
        if not self.late:
            return
        uplink, deliver = self.draw.choice(self.late)
        self.lockstep.settle()
        before = snapshot(self.lockstep.manager)
        known = next((one for one in self.lockstep.manager.sessions if one.number == uplink.session), None)
        is_stale = known is None or uplink.call_no <= known.last_call_no
        answer = deliver()
        assert isinstance(answer, Refusal) == is_stale
        if isinstance(answer, Refusal):
            assert answer.reason is (Reason.STALE_SESSION if known is None else Reason.STALE_CALL)
            assert snapshot(self.lockstep.manager) == before

    def fail(self, session: Session) -> None:
        """A worker comes back in a new process or in the same, or leaves; a Register is late; or the manager loses all."""
        number = [one.worker_id for one in self.introductions].index(session.worker_id)
        known = self.introductions[number]
        what = self.draw.choice(["process", "process", "link", "deregister", "late", "late", "manager", "epoch"])
        if what == "process":
            self._register(number, successor(known))
        elif what == "link":
            self._register(number, known._replace(register_no=known.register_no + 1))
        elif what == "deregister":
            self.lockstep.deregister(session.number)
        elif what == "late":
            back = self.draw.randrange(2)
            late = known._replace(incarnation=known.incarnation - back)
            if back:
                late = late._replace(process_key=b"process %d" % late.incarnation, predecessor_key=b"")
            assert isinstance(self.lockstep.register(late), Refusal)
        elif what == "manager":
            self.lockstep.restart()
        else:  # a worker has seen a larger epoch: the same sessions go on under larger stamps
            self.lockstep.epoch += 1
            self.lockstep.manager.raise_epoch(self.lockstep.epoch)


def explore(machine: type[ManagerMachine], num_histories: int) -> None:
    """Let hypothesis look for a history in which something breaks."""

    @settings(max_examples=num_histories, report_multiple_bugs=False, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def look(draw: random.Random) -> None:
        machine(draw, draw.choice([TIGHT, ROOMY])).run(50)

    look()


@pytest.mark.usefixtures("every_hash")
def test_no_law_breaks_whatever_the_network_does() -> None:
    """After every step of any history the audit is clean, and the state is the model's."""
    explore(ManagerMachine, 10)


@pytest.mark.parametrize("seed", range(12))
def test_no_law_breaks_in_a_long_history(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for hundreds of steps: deeper histories than hypothesis takes the time for."""
    monkeypatch.setattr(Lockstep, "default_hash", staticmethod([*HASH_FUNCTIONS.values()][seed % 3]))
    ManagerMachine(random.Random(seed), ROOMY if seed % 4 else TIGHT).run(200)

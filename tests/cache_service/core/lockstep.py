"""The manager and the model, driven side by side and compared whole after every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest

from kvpool.cache_service.core.block_pool import BlockPool
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.groups.state import StateSpec
from kvpool.cache_service.core.groups.unit import UnitSpec
from kvpool.cache_service.core.groups.unit_pool import UnitPool
from kvpool.cache_service.core.groups.window import WindowSpec
from kvpool.cache_service.core.hashing import HashFunction, xxh64
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Appended,
    AppendItem,
    ForkItem,
    Granted,
    GroupSpec,
    Layout,
    Limits,
    Registration,
    Reply,
    Root,
    SequenceKey,
    SequenceUpdate,
    Uplink,
    Wait,
    WorkerLoad,
)
from kvpool.cache_service.core.prefix_tree import Node, RootNode
from kvpool.cache_service.core.refusal import Refusal
from kvpool.cache_service.core.routing import RoutedWorker
from kvpool.cache_service.core.session import Session
from tests.cache_service.core.explained import Prediction
from tests.cache_service.core.kinds import tables, windows
from tests.cache_service.core.model import Model, ModelPool, ModelSession, Refused, token_ids

T = TypeVar("T")

FINGERPRINT = "model-a"


def low_8_bits(data: bytes) -> int:
    """A hash with 256 values: everything collides."""
    return xxh64(data) & 0xFF


def constant(data: bytes) -> int:
    """A hash with one value."""
    return 7


HASH_FUNCTIONS: dict[str, HashFunction] = {"xxh64": xxh64, "low 8 bits": low_8_bits, "constant": constant}


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Token ids as they travel: little-endian uint32."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def registration(
    worker_id: str = "w1",
    *,
    num_blocks: int | tuple[int, ...] = 9,
    block_size: int = 4,
    incarnation: int = 1,
    register_no: int = 1,
    windows: Sequence[tuple[int, int]] = (),
    grids: Sequence[int] = (),
    max_encoder_tokens: int = 0,
) -> Registration:
    """A well-formed introduction, of a process that has no proof that an earlier one has ended. `num_blocks`: of one group, or of
    several. `windows`: by group, tokens of the window, 0 for none, and scratch blocks; `grids`: by group, blocks of a state's grid,
    0 for none. Groups at the end may be left out. `max_encoder_tokens`: the last group has cross attention."""
    counts = (num_blocks,) if isinstance(num_blocks, int) else num_blocks
    of_windows = [*windows, *[(0, 0)] * (len(counts) - len(windows))]
    of_grids = [*grids, *[0] * (len(counts) - len(grids))]
    groups: list[GroupSpec] = []
    for count, (window, scratch), grid in zip(counts, of_windows, of_grids, strict=True):
        if grid:
            groups.append(StateSpec(count, grid_tokens=grid * block_size, scratch_blocks=scratch))
        elif window:
            groups.append(WindowSpec(count, window_tokens=window, ring_blocks=scratch))
        else:
            groups.append(DenseSpec(count))
    if max_encoder_tokens:
        groups[-1] = UnitSpec(counts[-1], max_encoder_tokens=max_encoder_tokens)
    return Registration(
        worker_id=worker_id,
        incarnation=incarnation,
        register_no=register_no,
        address=f"{worker_id}:1",
        model_name="a model",
        model_fingerprint=FINGERPRINT,
        layout=Layout(block_size, tuple(groups)),
        process_key=b"process %d" % incarnation,
    )


def successor(registration: Registration) -> Registration:
    """The introduction of the next process of the worker, which proves that the one before it has ended."""
    incarnation = registration.incarnation + 1
    return registration._replace(
        incarnation=incarnation,
        register_no=1,
        process_key=b"process %d" % incarnation,
        predecessor_key=registration.process_key,
    )


def refused(call: Callable[..., object], *arguments: Any, **fields: Any) -> Refusal:
    """The refusal that a call with these arguments ends with."""
    with pytest.raises(Refusal) as caught:
        call(*arguments, **fields)
    return caught.value


def path_of(node: Node) -> tuple[Root, int, tuple[int, ...]]:
    """Root, block size and all tokens on the way to a node, read off the tree itself."""
    pieces: list[bytes] = []
    while node.parent is not None:
        assert node.parent.find(node.tokens) is node
        pieces.append(node.tokens)
        node = node.parent
    assert isinstance(node, RootNode), "a node is cut off from its root"
    return *node.key, tuple(token_ids(b"".join(reversed(pieces))))


class Snapshot(NamedTuple):
    """All that can be seen of a manager: two equal ones mean that nothing has changed."""

    last_generation: int
    nodes: frozenset[tuple[object, ...]]
    sessions: tuple[tuple[int, object], ...]
    """Number of the last call, and all the rest."""


def pool_snapshot(pool: BlockPool) -> tuple[object, ...]:
    """Free-list order, states, counts, generations and content."""
    of_blocks = pool.state, pool.ref_count, pool.generation, pool.node
    return (
        tuple(pool.free_list()),
        tuple(pool.demoted()),
        *(tuple(map(of, range(1, pool.num_blocks))) for of in of_blocks),
        pool.num_evicted,
        tuple(pool.counts()),
    )


def session_snapshot(session: Session) -> tuple[int, object]:
    """The session with its pools and its sequences."""
    sequences = tuple(
        (
            key,
            sequence.key,
            bytes(sequence.tokens),
            tuple(map(tuple, tables(sequence))),
            tuple(window and (tuple(window.entries.items()), tuple(window.scratch)) for window in windows(sequence)),
            sequence.boundaries,
            sequence.kept,
            tuple(sequence.nodes),
            sequence.num_sealed,
            sequence.num_cached_tokens,
            sequence.num_computed_tokens,
            tuple(sequence.num_named),
            sequence.fenced,
            sequence.encoder_computed,
        )
        for key, sequence in session.sequences.items()
    )
    pools, wishes = tuple(map(pool_snapshot, session.pools)), tuple(session.reserve_wishes)
    state = session.number, session.lease_end, wishes, session.downlink.pending(), pools, sequences
    return session.last_call_no, state


def snapshot(manager: CacheManager) -> Snapshot:
    """Everything that decides what the manager will do next."""
    nodes = frozenset(
        (
            node,
            node.parent,
            node.tokens,
            node.block_hash,
            node.num_sequences,
            tuple(node.iter_leaders()),
            frozenset((holder, node.blocks_in(holder)) for holder in node.holders()),
            frozenset(node.iter_children()),
            tuple(node.input_blocks.items()) if isinstance(node, RootNode) else (),
        )
        for node, _ in iter(manager._tree.begin_walk(in_portions=False).step, None)
    )
    return Snapshot(manager.last_generation, nodes, tuple(map(session_snapshot, manager.sessions)))


class Lockstep:
    """One manager and one model. Every call goes to both; the answers and then the whole states must be equal."""

    default_hash: HashFunction = staticmethod(xxh64)
    """What is taken where a test names none; the fixture `every_hash` changes it."""

    def __init__(self, hash_function: HashFunction | None = None, limits: Limits | None = None) -> None:
        self.hash_function = hash_function or self.default_hash
        self.limits = limits or Limits()
        self.epoch = 0
        self.now = 0.0
        self.last_generation = 0
        self.viewers: list[Callable[[CacheManager], None]] = []
        """Called after every comparison."""
        self._granted: dict[tuple[str, int, int], int] = {}
        """Largest generation seen of each worker's block, over all sessions and epochs."""
        self.restart()

    def restart(self) -> None:
        """The manager dies and comes back with nothing but a larger epoch."""
        self.epoch += 1
        self.manager = CacheManager(
            self.epoch,
            lease_seconds=6.0,
            tick_seconds=0.5,
            limits=self.limits,
            hash_function=self.hash_function,
            explain_evictions=64,
        )
        self.model = Model(6.0, 0.5, self.limits)

    # -- one call on both

    def _both(self, real: Callable[[], T], modelled: Callable[[], None], *, stamps: bool | None = False) -> T | Refusal:
        """Run a call on both; a refusal must be the model's too, and must leave no trace.

        A call that `stamps` gets, unless refused, a generation larger than any before; other calls leave it alone. None: it may.
        """
        self.settle()
        before = snapshot(self.manager)
        result: T | Refusal
        try:
            result = real()
        except Refusal as refusal:
            result = refusal.with_traceback(None)
        if isinstance(result, Refusal):
            assert snapshot(self.manager) == before, f"{result!r} has changed something"
        generation = self.manager.last_generation
        if stamps is None:
            stamps = generation != before.last_generation
        if stamps and not isinstance(result, Refusal):
            assert generation > self.last_generation, "a granting call needs a stamp larger than any before"
            self.last_generation = generation
        else:
            assert generation == before.last_generation
        expected: Refused | None = None
        try:
            modelled()
        except Refused as refused:
            expected = refused
        refused_here = result if isinstance(result, Refusal) else None
        assert expected == refused_here, f"the core says {result!r}, the model {expected!r}"
        self.compare()
        return result

    def settle(self) -> None:
        """What is left of sessions that have ended parts prompts too, until it is swept: which windows are kept would depend on it,
        and the model forgets at once."""
        if any(session.dependents for session in self.manager.sessions):
            while self.manager.sweep():
                pass

    def register(self, registration: Registration) -> int | Refusal:
        """Register on both; answers with the session's number."""
        number = 0

        def real() -> int:
            nonlocal number
            registered = self.manager.register(registration, self.now)
            number = registered.session
            assert registered.epoch == self.manager.epoch
            return number

        return self._both(real, lambda: self.model.register(registration, number, self.now))

    def deregister(self, session: int) -> None:
        """End a session on both."""
        self._both(lambda: self.manager.deregister(session), lambda: self.model.deregister(session))

    def keep_alive(self, session: int, downlink_ack: int) -> Reply | Refusal:
        """Renew a lease on both; it takes a stamp if it grants something."""
        before = self.manager.last_generation

        def modelled() -> None:
            granted = self.model.keep_alive(session, downlink_ack, self.now, self.manager.last_generation)
            assert granted == (self.manager.last_generation > before), "a stamp is for a grant"

        return self._both(
            lambda: self.manager.keep_alive(session, downlink_ack, WorkerLoad(), self.now), modelled, stamps=None
        )

    def tick(self) -> None:
        """Expire leases on both."""
        expired = [session.number for session in self.manager.tick(self.now)]
        assert expired == self.model.tick(self.now)
        self.compare()

    def sweep(self) -> bool:
        """One slice of the sweep, which nobody may notice."""
        more = self.manager.sweep()
        self.compare()
        return more

    def _batch(
        self, real: Callable[[], tuple[list[Any], Reply]], modelled: Callable[[], list[Any]]
    ) -> tuple[list[Any], Reply] | Refusal:
        """A call on both that has an outcome for each item."""
        found: list[Any] = []

        def answered() -> tuple[list[Any], Reply]:
            outcomes, reply = real()
            found.extend(outcomes)
            return found, reply

        def compared() -> None:
            expected = modelled()
            assert expected == found, f"the core says {found}, the model {expected}"

        return self._both(answered, compared, stamps=True)

    def allocate(self, uplink: Uplink, *items: AllocateItem) -> tuple[list[Granted | Wait | Refusal], Reply] | Refusal:
        """Allocate on both, after Explain was asked what will be served."""
        prediction = Prediction.of(self.manager, uplink, items)
        result = self._batch(
            lambda: self.manager.allocate(uplink, items),
            lambda: self.model.allocate(uplink, items, self.manager.last_generation),
        )
        if prediction is not None and not isinstance(result, Refusal):
            prediction.require(result[0][0])
        return result

    def append(self, uplink: Uplink, *items: AppendItem) -> tuple[list[Appended | Refusal], Reply] | Refusal:
        """Append on both."""
        return self._batch(
            lambda: self.manager.append(uplink, items),
            lambda: self.model.append(uplink, items, self.manager.last_generation),
        )

    def fork(self, uplink: Uplink, *items: ForkItem) -> tuple[list[Appended | Refusal], Reply] | Refusal:
        """Fork on both."""
        return self._batch(
            lambda: self.manager.fork(uplink, items),
            lambda: self.model.fork(uplink, items, self.manager.last_generation),
        )

    def free(self, uplink: Uplink, *items: SequenceUpdate) -> Reply | Refusal:
        """Free on both."""
        return self._both(
            lambda: self.manager.free(uplink, items),
            lambda: self.model.free(uplink, items, self.manager.last_generation),
            stamps=True,
        )

    def route(self, root: Root, tokens: bytes) -> None:
        """Route and Explain tell the truth about prefixes and change nothing."""
        before = snapshot(self.manager)
        ranked = self.manager.route(root, tokens)
        explained = self.manager.explain(root, tokens).workers
        assert snapshot(self.manager) == before
        takes_prompts = {session.number for session in self.model.sessions if session.takes_prompts}
        for workers in (ranked, explained):
            assert {worker.session.number for worker in workers} == takes_prompts
            for worker in workers:
                session = self.model.session(worker.session.number)
                assert worker.encoder_cached == self.model.has_unit(session, root)
                cached, in_flight = self.model.reach(session, root, token_ids(tokens))
                assert worker.num_cached_tokens == cached
                assert not isinstance(worker, RoutedWorker) or worker.num_in_flight_tokens == in_flight

    # -- comparing

    def compare(self) -> None:
        """The audit is clean, and the core's whole state is the model's."""
        assert self.manager.check().violations == []
        numbers = [session.number for session in self.manager.sessions]
        assert numbers == [session.number for session in self.model.sessions]
        for session, modelled in zip(self.manager.sessions, self.model.sessions, strict=True):
            self._compare_session(session, modelled)
        budget = self.manager.budget
        assert budget.num_blocks == sum(session.last_granted for session in self.model.sessions)
        assert budget.num_slots == sum(session.last_granted * session.block_size for session in self.model.sessions)
        assert budget.max_tokens - budget.num_sequence_tokens == self.model.tokens_left()
        if not self.manager._retired:
            assert self.manager.num_prefix_nodes == len(self.model.nodes())
        for view in self.viewers:
            view(self.manager)

    def _compare_session(self, session: Session, modelled: ModelSession) -> None:
        for pool, of_model in zip(session.pools, modelled.pools, strict=True):
            self._compare_pool(session, pool, modelled, of_model)
        assert [(entry.number, entry.entry) for entry in session.downlink.pending()] == modelled.pending
        for name in ("last_call_no", "lease_end"):
            assert getattr(session, name) == getattr(modelled, name), name
        assert session.reserve_wishes == [pool.reserve_wish for pool in modelled.pools]
        assert list(session.sequences) == [(s.key.sequence_id, s.key.attempt) for s in modelled.sequences]
        for sequence, other in zip(session.sequences.values(), modelled.sequences, strict=True):
            assert token_ids(bytes(sequence.tokens)) == other.tokens
            assert tables(sequence) == other.tables
            for window, expected in zip(windows(sequence), other.windows, strict=True):
                assert (window is None) == (expected is None)
                if window is not None and expected is not None:
                    assert (window.entries, list(window.scratch)) == (expected.entries, expected.scratch)
            assert list(sequence.boundaries) == other.boundaries
            for name in ("key", "num_computed_tokens", "num_cached_tokens", "num_named", "fenced", "encoder_computed"):
                assert getattr(sequence, name) == getattr(other, name), name

    def _compare_pool(self, session: Session, pool: BlockPool, of_session: ModelSession, modelled: ModelPool) -> None:
        size, worker_id, group = of_session.block_size, session.worker_id, modelled.group
        left = self.model.left(of_session)
        assert (pool.counts(), pool.num_evicted) == (modelled.counts(left), modelled.num_evicted)
        assert list(pool.free_list()) == modelled.free_list, "the order of eviction differs"
        assert pool.demoted() == modelled.demoted
        for block in range(1, pool.num_blocks):
            assert pool.ref_count(block) == modelled.ref_count(block)
            assert (pool.state(block).name == "RESERVED") == (block in modelled.reserved)
            generation = pool.generation(block)
            assert generation == modelled.generation[block]
            assert not generation or generation >= self._granted.get((worker_id, group, block), 0), (
                "a generation went back"
            )
            self._granted[worker_id, group, block] = max(generation, self._granted.get((worker_id, group, block), 0))
            node, content = pool.node(block), modelled.content(block)
            assert (node is None) == (content is None)
            if node is not None and content is not None and isinstance(pool, UnitPool):
                assert isinstance(node, RootNode)
                assert node.key == (content[0], size)
                assert node.input_blocks[session.holder] == tuple(modelled.unit(content[0]))
            elif node is not None and content is not None:
                assert path_of(node) == (content[0], size, content[1])
                assert (pool.copy_of(node) == block) == (modelled.hit(content) == block)


def key(sequence_id: str, attempt: int = 1, round: int = 0) -> SequenceKey:
    """A sequence key."""
    return SequenceKey(sequence_id, attempt, round)

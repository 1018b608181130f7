"""The canonical form of a world: two worlds with the same fingerprint go on alike and obey the same laws.

Absolute numbers are left out. Of generations, sessions, call numbers, numbers of downlink entries and of registrations only the
order matters, because the code compares them and always makes new ones that are larger than all before: each is replaced by its
rank among those of its kind that are anywhere in the world. Left out too is what only counts (calls, evictions), what is derived
from the rest and compared with it by the audit (the tree's nodes, the index of attempts, the pools' counters), and the budget.
"""

from __future__ import annotations

import marshal
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Any

import xxhash

from kvpool.cache_service.core.block_pool import BlockPool
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Boundary, Grant, Stop
from kvpool.cache_service.core.prefix_tree import Node
from kvpool.cache_service.core.recovery import Recovery
from kvpool.cache_service.core.sequence import Sequence
from kvpool.cache_service.core.session import Session
from kvpool.worker_service.cache.events import Refused, Stopped, TableGranted
from kvpool.worker_service.cache.groups.dense import DenseTable
from kvpool.worker_service.cache.groups.group import GroupTable
from kvpool.worker_service.cache.groups.scratch import Scratch
from kvpool.worker_service.cache.groups.state import RunningState
from kvpool.worker_service.cache.groups.window import Ring
from kvpool.worker_service.cache.ledger import BlockLedger, Content
from kvpool.worker_service.cache.sequence import CacheSequence
from tests.cache_service.core.kinds import tables, windows
from tests.exhaustive.engine import TinyEngine
from tests.exhaustive.parts import Form
from tests.exhaustive.wire import form_of
from tests.exhaustive.world import Peer, World


def _ranks(values: list[Any]) -> tuple[int, ...]:
    rank = {value: index for index, value in enumerate(sorted(set(values)))}
    return tuple([rank[value] for value in values])


def fingerprint(world: World) -> bytes:
    """128 bits that stand for the world without its budget."""
    return fingerprint_of(world, forms_of(world))


def forms_of(world: World) -> list[Form]:
    """Of the manager and of each worker. A part that has not been changed has its form with it."""
    return [
        part.form
        if part is not None
        else _peer(index - 1, world.peers[index - 1])
        if index
        else _manager(world.manager)
        for index, part in enumerate(world.parts)
    ]


def fingerprint_of(world: World, forms: list[Form]) -> bytes:
    """The fingerprint, if the forms of the parts are known. Each absolute number is replaced by its rank; no generation stays 0."""
    forms = [_letters(world), *forms]
    whole = (
        [form.skeleton for form in forms],
        [asked.state() for asked in world.asked],
        _ranks([0, *chain.from_iterable(form.stamps for form in forms)]),
        _ranks([*chain.from_iterable(form.sessions for form in forms)]),
        _ranks([*chain.from_iterable(form.calls for form in forms)]),
        _ranks([*chain.from_iterable(form.entries for form in forms)]),
        _ranks([*chain.from_iterable(form.registers for form in forms)]),
    )
    return xxhash.xxh3_128_digest(marshal.dumps(whole, 2))


_NO_LETTERS = Form().of([])


def _letters(world: World) -> Form:
    """What is under way, in an order that does not depend on when it was sent."""
    if not world.wire:
        return _NO_LETTERS
    numbers = Form()
    found = []
    for letter in world.wire:
        peer = world.peers[letter.worker]
        is_waited_for = letter.call in peer.waits.values()
        form = None if letter.refusal else form_of(letter.method, letter.payload, letter.is_reply)
        found.append((letter.worker, letter.method, letter.is_reply, letter.refusal, is_waited_for, form))
    found.sort(key=repr)
    letters: list[Hashable] = []
    for worker, method, is_reply, refusal, is_waited_for, form in found:
        letters.append((worker, method, is_reply, refusal, is_waited_for, None if form is None else form.template))
        if form is not None:
            told = form.numbers
            session = told["sessions"][0] if told["sessions"] else world.peers[worker].engine.cache.session
            numbers.sessions += told["sessions"]
            numbers.calls += [(session, call) for call in told["calls"]]
            numbers.entries += [(session, entry) for entry in told["entries"]]
            numbers.stamps += told["stamps"]
            numbers.registers += [
                (worker, incarnation, number)
                for incarnation, number in zip(told["incarnations"], told["registers"], strict=True)
            ]
    return numbers.of(letters)


# -- workers


def _peer(index: int, peer: Peer) -> Form:
    numbers = Form()
    engine = peer.engine
    state = engine.cache.state
    link = state.link
    numbers.registers.append((index, peer.incarnation, peer.register_no))
    numbered = {id(sequence): number for number, sequence in enumerate(_all_sequences(engine))}

    def numbers_of(some: Iterable[CacheSequence]) -> list[int]:
        return [numbered[id(sequence)] for sequence in some]

    linked: Hashable = None
    if link is not None:
        numbers.sessions.append(link.session)
        numbers.entries.append((link.session, link.applied_number))
        in_flight = None
        if link.in_flight is not None:
            request = link.in_flight.request
            method = type(request).__name__.removesuffix("Request")
            form = form_of(method, request.SerializeToString(deterministic=True), False)
            numbers.stamps += form.numbers["stamps"]
            in_flight = form.template
        told: Hashable = None
        if link.report is not None:
            report = link.report
            parts = [report._part, *report._parts.__reduce__()[1][0][report._parts.__reduce__()[2] :]]  # type: ignore[index]
            forms = [form_of("Report", part.SerializeToString(deterministic=True), False) for part in parts]
            for form in forms:
                numbers.stamps += form.numbers["stamps"]
            told = tuple(form.template for form in forms), report._num_sent, report.is_live, report.num_calls_since
        # Not how many calls were stale: that decides something from MAX_STALE_CALLS on, which no world has faults enough for.
        linked = in_flight, told, link.is_unanswered
    sequences = [_sequence(sequence, numbers) for sequence in _all_sequences(engine)]
    for reserve in state.reserves:
        for reserved in (*reserve.spare(), *reserve.returning):
            numbers.stamps.append(reserved.generation)
    return numbers.of(
        (
            tuple(map(bool, peer.waits.values())),
            linked,
            sequences,
            numbers_of(state.sequences.values()),
            numbers_of(state.ending),
            numbers_of(state.parked),
            numbers_of(state.forks),
            [
                (numbered[id(copying.source)], numbered[id(copying.fork)], [tuple(copy) for copy in copying.copies])
                for copying in (*state.copies_due, *state.copies_made)
            ],
            len(state.copies_due),
            state.forks_found_no_room,
            [(tuple(copied.copy), copied.slots, copied.fork.state.value) for copied in engine.copies],
            numbers_of(engine.waiting),
            numbers_of(engine.running),
            [
                (
                    numbered[id(part.sequence)],
                    part.start,
                    part.end,
                    part.tables,
                    part.tokens,
                    part.state and tuple(part.state),
                )
                for part in engine.step
            ],
            [[reserved.block for reserved in reserve.spare()] for reserve in state.reserves],
            [[reserved.block for reserved in reserve.returning] for reserve in state.reserves],
            state.report_due_at is None,
            state.is_urgent,
            state.pool_is_empty,
            state.ask_again_at,
            state.waits_for_blocks,
            [(type(event).__name__, numbered.get(id(getattr(event, "sequence", None)), -1)) for event in state.events],
            [_ledger(ledger, numbers) for ledger in state.ledgers],
            [slots.slots for slots in engine.slots],
        )
    )


def _all_sequences(engine: TinyEngine) -> list[CacheSequence]:
    """Each once, in an order that only depends on where it is."""
    state = engine.cache.state
    in_flight = state.link.in_flight.stated if state.link is not None and state.link.in_flight is not None else ()
    places = [
        state.sequences.values(),
        state.ending,
        state.parked,
        engine.waiting,
        engine.running,
        [part.sequence for part in engine.step],
        [stated.sequence for stated in in_flight],
        [one for copying in (*state.copies_due, *state.copies_made) for one in (copying.source, copying.fork)],
        [copied.fork for copied in engine.copies],
        [event.sequence for event in state.events if isinstance(event, TableGranted | Refused | Stopped)],
    ]
    return list({id(sequence): sequence for place in places for sequence in place}.values())


def _sequence(sequence: CacheSequence, numbers: Form) -> Hashable:
    return (
        sequence.id.sequence_id,
        sequence.id.attempt,
        sequence.round,
        sequence.root.tenant_salt,
        tuple(sequence.tokens),
        sequence.max_tokens,
        sequence.no_wait,
        sequence.state.value,
        tuple(map(tuple, sequence.tables)),
        [_table(table, numbers) for table in sequence.group_tables],
        sequence.boundaries,
        _blocks_of(sequence.content) if sequence.scratches() else None,
        sequence.num_cached_tokens,
        sequence.num_computed_tokens,
        sequence.uses_blocks,
        sequence.in_step,
        sequence.maybe_granted,
        sequence.parent and (*sequence.parent.id, sequence.parent.round),
        sequence.num_copies,
        sequence.num_forks_to_come,
        sequence.is_superseded,
        sequence.acked_tokens,
        sequence.acked_computed_tokens,
        sequence.parked_on and tuple(sequence.parked_on),
        sequence.parked_position,
    )


def _table(table: GroupTable, numbers: Form) -> Hashable:
    if isinstance(table, Scratch):
        return _scratch(table, numbers)
    assert isinstance(table, DenseTable), "of units the worlds have none"
    numbers.stamps += table.generations
    return table.num_unstated


def _scratch(scratch: Scratch, numbers: Form) -> Hashable:
    reserved = [*scratch.named.values(), *scratch.scratch(), *scratch._scratch, *scratch._from_reserve]
    numbers.stamps += [one.generation for one in reserved]
    numbers.stamps += [entry.generation for entry in (*scratch._bound, *scratch._released)]
    return (
        [(index, one.block) for index, one in scratch.named.items()],
        [(index, one.block) for index, one in scratch.placed.items()],
        [one.block for one in scratch.free],
        [one.block for one in scratch._scratch],
        [one.block for one in scratch._from_reserve],
        [(entry.table_index, entry.block) for entry in scratch._bound],
        [(entry.table_index, entry.block) for entry in scratch._released],
        list(scratch._to_drop),
        scratch._first if isinstance(scratch, Ring) else None,
        (scratch.running.block, scratch._begin) if isinstance(scratch, RunningState) else None,
    )


def _blocks_of(content: Content | None) -> Hashable:
    """In which blocks a content and those before it are."""
    found: list[tuple[int, ...]] = []
    while content is not None:
        found.append(tuple(content.blocks))
        content = content.parent
    return tuple(found)


def _ledger(ledger: BlockLedger, numbers: Form) -> Hashable:
    numbers.stamps += ledger._generation
    held = {id(content): block for block, content in enumerate(ledger._contents) if content is not None}
    return (
        list(ledger._num_users),
        [_chain_of(content, held) for content in ledger._contents],
        list(ledger._idle),
    )


def _chain_of(content: Content | None, held: dict[int, int]) -> Hashable:
    """What a block holds, from its root on, and which block still holds each piece."""
    pieces: list[Hashable] = []
    while content is not None:
        pieces.append((content.tokens, held.get(id(content), 0), content.root.tenant_salt))
        content = content.parent
    return tuple(pieces)


# -- the manager


def _manager(manager: CacheManager) -> Form:
    numbers = Form()
    known = sorted(manager._incarnations.known.items())
    numbers.registers += [(int(worker[1:]), newest.incarnation, newest.register_no) for worker, newest in known]
    return numbers.of(
        (
            [_session(session, manager._recoveries.get(session.number), numbers) for session in manager.sessions],
            [_session(session, None, numbers) for session in manager._retired],
            [(worker, newest.process_key) for worker, newest in known],
        )
    )


def _session(session: Session, recovery: Recovery | None, numbers: Form) -> Hashable:
    numbers.sessions.append(session.number)
    numbers.calls.append((session.number, session.last_call_no))
    numbers.entries += [(session.number, entry.number) for entry in session.downlink.pending()]
    for pool in session.pools:
        numbers.stamps += [pool.generation(block) for block in range(1, pool.num_blocks)]
    numbers.registers.append((int(session.worker_id[1:]), session.registration.incarnation, 0))
    pending: list[Hashable] = []
    for _, entry in session.downlink.pending():
        if isinstance(entry, Grant):
            numbers.stamps.append(entry.generation)
            pending.append(("grant", entry.group, entry.blocks))
        elif isinstance(entry, Boundary):
            pending.append(("boundary", tuple(entry.key), entry.num_tokens))
        else:
            assert isinstance(entry, Stop)
            pending.append(("stop", tuple(entry.key)))
    reported: Hashable = None
    if recovery is not None:
        numbers.stamps.append(recovery._restored[0].last_stamp)
        blocks_of = [one.blocks for one in recovery._restored]
        for blocks in blocks_of:
            numbers.stamps += [generation for _, generation in blocks.values()]
        reported = (
            recovery.num_parts,
            [
                (one.tokens, _number(recovery._contents, one.parent), one.live_node is None)
                for one in recovery._contents
            ],
            [[(block, _path(node)) for block, (node, _) in blocks.items()] for blocks in blocks_of],
        )
    return (
        session.worker_id,
        session.recovering,
        session.num_report_parts,
        reported,
        tuple(session.reserve_wishes),
        pending,
        [_pool(pool) for pool in session.pools],
        [
            (
                tuple(sequence.key),
                bytes(sequence.tokens),
                tuple(map(tuple, tables(sequence))),
                _windows(sequence),
                _path(sequence.root),
                len(sequence.nodes),
                sequence.num_sealed,
                sequence.num_cached_tokens,
                sequence.num_computed_tokens,
                tuple(sequence.num_named),
                sequence.fenced,
            )
            for sequence in session.sequences.values()
        ],
    )


def _windows(sequence: Sequence) -> Hashable:
    return (
        [
            None if window is None else (list(window.entries.items()), list(window.scratch), sorted(window.ends))
            for window in windows(sequence)
        ],
        sequence.boundaries,
    )


def _number(contents: list[Any], content: Any) -> int:
    return next((number for number, one in enumerate(contents) if one is content), -1)


def _pool(pool: BlockPool) -> Hashable:
    blocks = range(1, pool.num_blocks)
    return (
        tuple(pool.free_list()),
        len(pool.demoted()),
        len(pool.expected()),
        tuple(int(pool.state(block)) for block in blocks),
        tuple(_sealed(pool, block) for block in blocks),
    )


def _sealed(pool: BlockPool, block: int) -> Hashable:
    node = pool.node(block)
    return None if node is None else (_path(node), pool.copy_of(node) == block)


def _path(node: Node) -> Hashable:
    """What a node holds, up to its root."""
    path = [node.tokens]
    while node.parent is not None:
        node = node.parent
        path.append(node.tokens)
    return tuple(path)

"""The next call to the manager: Free before Append before Allocate, because each makes room for the next. A Fork comes after the
Append of what it shares, and before the Free of its parent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List

from kvpool.protocol.tokens import TOKEN_BYTES, pack_tokens
from kvpool.v1 import cache_pb2

from . import forks, naming, parking
from .entry import add_entries, add_spare
from .link_state import LinkState, MutatingCall, Request, Stated
from .sequence import CacheSequence, SequenceState
from .state import CacheState


def next_call(
    state: CacheState, link: LinkState, candidates: Callable[[], List[CacheSequence]], now: float
) -> MutatingCall | None:
    """The next call, if one is due. `candidates` is called after parked sequences are woken."""
    report = link.report
    if report is None:
        return _working_call(state, link, candidates, now)
    if not report.is_live:
        return _report_call(link, report.part)
    # Work first, but the cache does not wait for the end of it.
    is_due = now >= report.retry_at
    if not is_due or report.num_calls_since < report.MOST_CALLS_SINCE:
        call = _working_call(state, link, candidates, now)
        if call is not None:
            report.num_calls_since += 1
            return call
    if not is_due:
        return None
    report.num_calls_since = 0
    return _report_call(link, report.part)


def _working_call(
    state: CacheState, link: LinkState, candidates: Callable[[], List[CacheSequence]], now: float
) -> MutatingCall | None:
    parking.wake(state, now)
    targets = state.spare_targets()
    return (
        _free(state, link, targets)
        or _fork(state, link, targets, now)
        or _append(state, link, targets, now)
        or _allocate(state, link, targets, candidates(), now)
    )


def next_call_at(state: CacheState, link: LinkState, now: float) -> float | None:
    """When a call will be due if nothing happens until then; None: never."""
    if now < link.retry_at:
        return link.retry_at
    times = []
    if link.report is not None:
        if not link.report.is_live:
            return now
        times.append(max(now, link.report.retry_at))
    if state.report_due_at is not None:
        times.append(state.report_due_at)
    if state.parked:
        times.append(now + state.settings.prefix_wait_seconds / 4)
    if state.forks and now < state.forks_retry_at:
        times.append(state.forks_retry_at)
    if now < state.ask_again_at:
        times.append(state.ask_again_at)
    return min(times, default=None)


_ENTRY_BYTES = 12
"""Size of a table entry in a message: block id and generation as varints."""


def _one_call(state: CacheState, sequences: Iterable[CacheSequence]) -> list[CacheSequence]:
    """The first sequences that fit into one call; at least one, if there is one."""
    chosen: list[CacheSequence] = []
    num_bytes = 0
    for sequence in sequences:
        num_tokens = len(sequence.tokens)
        if sequence.group_tables:
            num_entries = sum([table.num_entries_of_news for table in sequence.group_tables])
        else:
            num_entries = sum([group.num_for(sequence, state.settings.sizes) for group in state.settings.groups])
        num_bytes += TOKEN_BYTES * (num_tokens - sequence.acked_tokens)
        num_bytes += _ENTRY_BYTES * num_entries
        is_full = len(chosen) == state.settings.max_items_per_call or num_bytes > state.settings.max_call_bytes
        if chosen and is_full:
            break
        chosen.append(sequence)
    return chosen


def _wishes(state: CacheState, link: LinkState, named: Iterable[CacheSequence], targets: list[int]) -> list[int]:
    """Blocks wanted in the reserve of each group once a call that states all entries of `named` is executed: `targets` spare ones,
    and those bound to other sequences but not stated yet."""
    skip = {id(sequence) for sequence in named}
    others = [sequence for sequence in state.sequences.values() if id(sequence) not in skip]
    wishes = []
    for group, (reserve, target) in enumerate(zip(state.reserves, targets, strict=True)):
        unnamed = sum([sequence.group_tables[group].num_unstated for sequence in others if sequence.group_tables])
        surplus = len(reserve) - target
        # Return only a clear surplus, or everything when idle; else every report would move a few blocks. And only to a manager
        # that answers: while it is away it grants nothing, and decoding may speed up again.
        is_too_much = surplus > 0 and (target == 0 or surplus > target)
        if is_too_much and not link.is_unanswered:
            reserve.give_up(surplus)
        wishes.append(max(target, len(reserve)) + unnamed)
    return wishes


def _free(state: CacheState, link: LinkState, targets: list[int]) -> MutatingCall | None:
    ready = _one_call(state, (sequence for sequence in state.ending if forks.may_free(state, sequence)))
    if not ready:
        return None
    # From here on this worker does not use their blocks: the manager may grant them again before its answer arrives.
    for sequence in ready:
        if sequence.uses_blocks:
            naming.name_end(state, sequence)
        state.let_go(sequence)
    wishes = _wishes(state, link, ready, targets)
    request = cache_pb2.FreeRequest()
    # All computed tokens, so that their blocks are sealed first.
    stated = [
        _state(state, request.items.add().update, sequence, len(sequence.tokens), sequence.num_computed_tokens)
        for sequence in ready
    ]
    return _call(state, link, request, stated, wishes)


def _fork(state: CacheState, link: LinkState, targets: list[int], now: float) -> MutatingCall | None:
    if now < state.forks_retry_at or not (_is_due(state, now) or forks.is_pressing(state)):
        return None
    ready = _one_call(state, forks.to_state(state))
    if not ready:
        return None
    wishes, size = _wishes(state, link, ready, targets), state.settings.block_size
    request, stated = cache_pb2.ForkRequest(), []
    for child in ready:
        assert child.parent is not None
        child.maybe_granted = True
        item = request.items.add(parent=child.parent.key, num_shared_blocks=child.acked_computed_tokens // size)
        # All tokens: a sequence has one at least.
        num_full = child.num_computed_tokens // size * size
        stated.append(_state(state, item.update, child, len(child.tokens), num_full))
    return _call(state, link, request, stated, wishes)


def _is_due(state: CacheState, now: float) -> bool:
    """Whether a call must state now what the manager does not know."""
    return state.is_urgent or (state.report_due_at is not None and now >= state.report_due_at)


def _append(state: CacheState, link: LinkState, targets: list[int], now: float) -> MutatingCall | None:
    # Their forks must be stated first, and before that what the forks share.
    ending = []
    if state.forks and now >= state.forks_retry_at and forks.is_pressing(state):
        ending = [parent for parent in forks.behind(state) if parent.state is SequenceState.ENDING]
    wants_blocks = _wants_refill(state, targets) or any(state.returning())
    wants_blocks = wants_blocks or any(
        reserve and not target for reserve, target in zip(state.reserves, targets, strict=True)
    )
    if not (ending or _is_due(state, now) or wants_blocks or _makes_room_for_a_fork(state, targets)):
        return None
    size = state.settings.block_size
    unreported = ending + [
        sequence
        for sequence in _appendable(state)
        if sequence.num_computed_tokens // size * size > sequence.acked_computed_tokens or sequence.has_news
    ]
    reports = _one_call(state, unreported)
    if len(reports) == len(unreported):
        # Blocks filled while the call is in flight get a time of their own, and so do forks, which can be stated after it. If the
        # call fails, the next one is urgent.
        state.report_due_at = now + state.settings.report_seconds if state.forks else None
        state.is_urgent = False
    if not (reports or wants_blocks):
        return None
    wishes = _wishes(state, link, reports, targets)
    request, stated = cache_pb2.AppendRequest(), []
    for sequence in reports:
        num_full = sequence.num_computed_tokens // size * size
        stated.append(_state(state, request.items.add().update, sequence, num_full, num_full))
    return _call(state, link, request, stated, wishes)


def _appendable(state: CacheState) -> list[CacheSequence]:
    """The live sequences of which the manager would take an Append."""
    return [
        sequence
        for sequence in state.sequences.values()
        if sequence.state is SequenceState.LIVE and sequence.parent is None and not sequence.is_superseded
    ]


def _wants_refill(state: CacheState, targets: list[int]) -> bool:
    """Whether the reserve is too small to wait for the next report: below half the target, or below the need of the next step; or
    what is to be named at boundaries lacks blocks."""
    growing = state.settings.growing
    for group in state.settings.keeping_boundaries:
        if len(state.reserves[group]) < targets[group] and not state.pool_is_empty[group]:
            return True
    if not growing or any(state.pool_is_empty[group] for group in growing):
        return False
    num_spare, target = state.num_spare, targets[growing[0]]
    if num_spare < min(target, state.num_forks_to_come):
        return True
    # At most one block per sequence is due: cheaper to compare first.
    return num_spare < (target + 1) // 2 or (num_spare < len(state.sequences) and num_spare < state.num_blocks_due())


def _makes_room_for_a_fork(state: CacheState, targets: list[int]) -> bool:
    """Whether forks wait for blocks that sequences have released, and the manager does not know it. The sequences may themselves
    wait for the forks, and then no progress of theirs would state it."""
    if not state.settings.keeping_boundaries or not state.num_forks_to_come:
        return False
    live = _appendable(state)
    for group in state.settings.keeping_boundaries:
        if len(state.reserves[group]) < targets[group]:
            copied = forks.blocks_to_copy(state, group)
            if any(sequence.group_tables[group].has_to_release(copied) for sequence in live):
                return True
    return False


def _allocate(
    state: CacheState, link: LinkState, targets: list[int], candidates: List[CacheSequence], now: float
) -> MutatingCall | None:
    is_short = any(
        state.pool_is_empty[group] and len(state.reserves[group]) < targets[group] for group in state.settings.growing
    )
    hold_back = is_short or now < state.ask_again_at
    # An unanswered Allocate is repeated even then: blocks that it was granted, if any, are of no use to others.
    chosen = _one_call(
        state,
        (
            sequence
            for sequence in candidates
            if sequence.state is SequenceState.WAITING
            and (sequence.maybe_granted or not hold_back)
            and state.sequences.get(sequence.id, sequence) is sequence
        ),
    )
    if not chosen:
        return None
    for sequence in chosen:
        sequence.state = SequenceState.ALLOCATING
        sequence.maybe_granted = True
        state.sequences[sequence.id] = sequence
    wishes, settings = _wishes(state, link, (), _targets_with(state, targets, chosen)), state.settings
    request, stated = cache_pb2.AllocateRequest(), []
    for sequence in chosen:
        prompt = pack_tokens(sequence.tokens)
        request.items.add(
            key=sequence.key,
            root=sequence.root,
            tokens=prompt,
            max_new_tokens=max(1, sequence.max_tokens - len(sequence.tokens)),
            no_wait=sequence.no_wait,
            max_cached_tokens=sequence.max_cached_tokens,
            boundaries=sequence.kept if settings.keeping_boundaries else (),
            retention_interval_tokens=settings.retention_interval if settings.keeping_boundaries else 0,
            num_encoder_tokens=sequence.num_encoder_tokens,
        )
        stated.append(Stated(sequence, len(sequence.tokens), 0, prompt))
    return _call(state, link, request, stated, wishes)


def _targets_with(state: CacheState, targets: list[int], sequences: List[CacheSequence]) -> list[int]:
    """The size of the reserve once these sequences have their tables, so that their first decode does not wait for a call. Less if
    that could take blocks that they need or that are hits for them, because the manager fills the reserve first. Just `targets` if
    the sequences will be refused: the surplus, which is returned at once, would have them asked for again at once, for ever."""
    settings = state.settings
    for index in settings.keeping_boundaries:
        group = settings.groups[index]
        if sum(group.num_for(sequence, settings.sizes) for sequence in sequences) > state.num_evictable(index):
            return targets
    num_left = state.num_blank() - sum(sequence.num_blocks(settings.block_size) for sequence in sequences)
    most = state.num_spare + num_left
    joined = state.spare_targets(sequences)
    return [
        max(target, min(joined[group], most)) if group in settings.growing else target
        for group, target in enumerate(targets)
    ]


def _state(
    state: CacheState, update: cache_pb2.SequenceUpdate, sequence: CacheSequence, num_tokens: int, num_computed: int
) -> Stated:
    """Write to `update` what the manager has not acknowledged of a sequence, up to `num_tokens` tokens and `num_computed` computed
    ones. What it has released is from now on not used any more."""
    start = sequence.acked_tokens
    num_tokens = max(num_tokens, start)
    update.key.CopyFrom(sequence.key)
    update.start, update.num_computed_tokens = start, num_computed
    update.tokens = pack_tokens(sequence.tokens[start:num_tokens])
    statements = []
    for group, (ledger, table) in enumerate(zip(state.ledgers, sequence.group_tables, strict=False)):
        statement, dropped = table.state(forks.blocks_to_copy(state, group) if sequence.num_copies else ())
        statements.append(statement)
        if sequence.uses_blocks:
            for block in dropped:
                ledger.drop(block)
        add_entries(update.bound, group, statement.bound)
        add_entries(update.released, group, statement.released)
        add_spare(update.scratch, group, statement.scratch)
        update.encoder_computed = update.encoder_computed or statement.encoder_computed
    return Stated(sequence, num_tokens, num_computed, statements=tuple(statements))


def _call(
    state: CacheState, link: LinkState, request: Request, stated: List[Stated], wishes: List[int]
) -> MutatingCall:
    """The call that sends a request, with the wishes for the reserves and their surplus."""
    returned = state.returning()
    request.uplink.CopyFrom(link.uplink(wishes, returned))
    return MutatingCall(request, tuple(stated), returned)


def _report_call(link: LinkState, part: cache_pb2.ReportRequest) -> MutatingCall:
    """Send the next part of the report."""
    request = cache_pb2.ReportRequest()
    request.CopyFrom(part)
    request.uplink.CopyFrom(link.uplink((), ()))
    return MutatingCall(request, (), ())

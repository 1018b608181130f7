"""Reports: what a worker says that it holds is taken as it is said, and what contradicts itself ends the session."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.contents import Stored
from kvpool.cache_service.core.manager import REPORT_FIRST_SECONDS, CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    ContentRun,
    Granted,
    Limits,
    ReportedBlocks,
    ReportedSequence,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
)
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.restored import Case
from tests.cache_service.core.desk import Table, first_table
from tests.cache_service.core.lockstep import FINGERPRINT, key, refused, registration, token_bytes
from tests.cache_service.core.reporter import BaseReporter

SIZE = 4
ROOT = Root(FINGERPRINT)
OLD = 5
"""A generation that an earlier manager gave."""


class Reporter(BaseReporter):
    """A worker that registers with state and reports what a test says."""

    def __init__(
        self, manager: CacheManager | None = None, worker_id: str = "w", num_blocks: int = 17, *, now: float = 0.0
    ) -> None:
        introduction = registration(worker_id, num_blocks=num_blocks, block_size=SIZE)
        introduction = introduction._replace(register_no=introduction.register_no + round(now * 100))
        super().__init__(manager or CacheManager(3), introduction, now)

    def allocate(self, name: str, tokens: list[int]) -> Table:
        item = AllocateItem(key(name), ROOT, token_bytes(tokens), no_wait=True)
        (outcome,), _ = self.manager.allocate(self.uplink(), [item])
        assert isinstance(outcome, Granted), outcome
        return first_table(outcome)

    def refused(self, part: int, content: dict[str, object]) -> Refusal:
        """Report something that cannot be: the session ends, and nothing of it stays."""
        refusal = refused(self.report, part, last=True, **content)
        self.check()
        return refusal


def run(*blocks: int, parent: int = 0, first: int = 0, root: Root | None = ROOT) -> ContentRun:
    """A chain of contents 4·first, 4·first + 1, …, one block each, all of generation OLD."""
    tokens = token_bytes(range(first * SIZE, (first + len(blocks)) * SIZE))
    generations = tuple(OLD if block else 0 for block in blocks)
    return ContentRun(
        parent, root if not parent else None, tokens, len(blocks), (ReportedBlocks(0, blocks, generations),)
    )


def in_blocks(group: int, blocks: tuple[int, ...], generations: tuple[int, ...]) -> ContentRun:
    """A chain of one content, with these blocks."""
    return run(1)._replace(blocks=(ReportedBlocks(group, blocks, generations),))


def sequence(
    name: str, num_tokens: int, computed: int, *blocks: int, cached: int = 0, attempt: int = 1
) -> ReportedSequence:
    """One that counts from 0."""
    table = tuple(TableEntry(index, block, OLD) for index, block in enumerate(blocks))
    return ReportedSequence(key(name, attempt), ROOT, token_bytes(range(num_tokens)), computed, cached, (table,))


def states(worker: Reporter, *blocks: int) -> list[State]:
    return [worker.session.pools[0].state(block) for block in blocks]


def test_until_the_report_is_complete_nothing_else_is_answered_and_nobody_is_routed_there() -> None:
    worker = Reporter()
    manager = worker.manager
    for call in (
        lambda: manager.allocate(worker.uplink(), []),
        lambda: manager.append(worker.uplink(), []),
        lambda: manager.free(worker.uplink(), []),
    ):
        assert refused(call).reason is Reason.RECOVERING
    worker.report(last=False, contents=(run(3, 4),))
    assert not manager.route(ROOT, token_bytes(range(8)))
    worker.report(1)
    (routed,) = manager.route(ROOT, token_bytes(range(9)))
    assert routed.num_cached_tokens == 8
    assert manager.allocate(worker.uplink(), [])[0] == []


def test_a_report_is_listed_for_followers_of_the_contents_once_it_is_complete() -> None:
    """Look-ups do not see it before."""
    worker = Reporter()
    worker.report(last=False, contents=(run(3, 4),))
    contents = worker.manager.follow_contents(100)
    worker.check()
    assert contents.is_complete
    assert contents.since(0, 100) == []
    worker.report(1, contents=(run(7, first=9),))
    worker.check()
    events = contents.since(0, 100)
    assert events is not None
    stored = [event for event in events if isinstance(event, Stored)]
    assert [event.number for event in stored] == [1, 2, 3]
    assert [event.tokens for event in stored] == [token_bytes(range(at, at + SIZE)) for at in (0, SIZE, 9 * SIZE)]
    assert {event.session for event in stored} == {worker.number}


def test_complete_blocks_are_hits_with_their_old_generation() -> None:
    worker = Reporter()
    worker.report(contents=(run(3, 9),))
    granted = worker.allocate("a", [*range(8), 99])
    assert granted.blocks[:2] == (3, 9)
    assert granted.generations[:2] == (OLD, OLD)
    assert granted.generations[2] > 3 << 40


def test_the_order_of_eviction_is_the_one_reported() -> None:
    """What is not listed goes first; what is listed but in a table is passed over."""
    worker = Reporter()
    worker.report(
        contents=(run(1, 2, 3), run(4, first=7), run(5, first=8)),
        sequences=(sequence("a", 5, 4, 1, 6),),
        idle_blocks=((4, 3, 1, 2, 16),),
    )
    order = [block for block in worker.session.pools[0].free_list() if worker.session.pools[0].is_cached(block)]
    assert order == [5, 4, 3, 2]


def test_a_live_sequence_goes_on_where_it_was() -> None:
    """Shared, own and unfinished blocks; then an Append binds a block of the reported reserve, and Free gives all back."""
    worker = Reporter()
    worker.report(
        contents=(run(1, 2),),
        sequences=(sequence("a", 10, 9, 1, 2, 3, cached=4), sequence("b", 7, 5, 1, 7, cached=4)),
        reserve=((ReservedBlock(8, OLD),),),
    )
    pool = worker.session.pools[0]
    assert states(worker, 1, 2, 3, 7, 8, 9) == [State.HELD] * 4 + [State.RESERVED, State.FREE]
    assert [pool.ref_count(block) for block in (1, 2, 3, 7)] == [2, 1, 1, 1]
    assert worker.session.sequences["a", 1].num_sealed == 2
    bound = SequenceUpdate(key("a"), 10, token_bytes(range(10, 14)), 13, ((TableEntry(3, 8, OLD),),))
    (appended,), _ = worker.manager.append(worker.uplink(), [AppendItem(bound)])
    assert not isinstance(appended, Refusal)
    assert appended.num_sealed_tokens == 12
    worker.manager.free(worker.uplink(), [bound, SequenceUpdate(key("b"))])
    worker.check()
    assert states(worker, 1, 2, 3, 7, 8) == [State.CACHED] * 3 + [State.FREE] * 2


def test_content_without_a_block_carries_what_hangs_from_it() -> None:
    """The parent was evicted; a request that computes it anew finds the child again."""
    worker = Reporter()
    worker.report(contents=(run(0, 0, 5),))
    assert worker.allocate("a", [*range(12), 99]).num_cached_tokens == 0
    assert worker.manager.reconciled[Case.BLOCKLESS] == 2
    update = SequenceUpdate(key("a"), num_computed_tokens=8)
    worker.manager.free(worker.uplink(), [update])
    assert worker.allocate("b", [*range(12), 99]).num_cached_tokens == 12


def test_content_that_nothing_needs_leaves_nothing_behind() -> None:
    worker = Reporter()
    worker.report(contents=(run(0, 0),))
    assert worker.manager.num_prefix_nodes == 0


def test_of_two_blocks_with_one_content_the_first_serves_and_the_other_is_free_unless_a_table_has_it() -> None:
    worker = Reporter()
    worker.report(contents=(run(1), run(2), run(3)), sequences=(sequence("a", 6, 4, 2, 4),))
    assert states(worker, 1, 2, 3) == [State.CACHED, State.HELD, State.FREE]
    assert worker.manager.reconciled[Case.DUPLICATE] == 2
    assert worker.allocate("b", [*range(4), 99]).blocks[0] == 1


def test_a_table_may_say_alone_what_its_complete_blocks_hold() -> None:
    """An engine of others may leave the contents out; two tables that share such a block agree on it."""
    worker = Reporter()
    worker.report(sequences=(sequence("a", 9, 8, 1, 2, 3), sequence("b", 6, 4, 1, 4)))
    assert worker.session.pools[0].ref_count(1) == 2
    assert worker.manager.route(ROOT, token_bytes(range(9)))[0].num_cached_tokens == 8


def test_parts_may_be_repeated_but_not_skipped() -> None:
    worker = Reporter()
    worker.report(0, last=False, contents=(run(1),))
    worker.report(0, last=False, contents=(run(1),))
    refusal = refused(worker.report, 2)
    assert (refusal.reason, refusal.position) == (Reason.GAP, 1)
    worker.report(1, contents=(run(2, parent=1, first=1),))
    worker.report(1, contents=(run(2, parent=1, first=1),))
    assert worker.allocate("a", [*range(8), 9]).num_cached_tokens == 8
    assert refused(worker.report, 2).reason is Reason.GAP


def test_the_contents_of_only_so_many_workers_are_taken_in_at_once() -> None:
    """The third is asked to wait until one of the two is complete, or its session has ended. What is in use waits for nobody."""
    manager = CacheManager(3, limits=Limits(max_reports_at_once=2))
    first, second, third, fourth = (Reporter(manager, f"w{i}") for i in range(4))
    manager.tick(REPORT_FIRST_SECONDS)
    for worker in (first, second):
        worker.report(0, last=False, contents=(run(1),))
    assert refused(third.report, 0, contents=(run(1),)).reason is Reason.RECOVERING
    third.report(0, last=False, live=True, sequences=(sequence("a", 5, 4, 1, 2),), idle_blocks=((3,),))
    assert refused(third.report, 1, contents=(run(3),)).reason is Reason.RECOVERING
    assert third.allocate("b", [90]).blocks == (4,)
    first.report(1)
    third.report(1, contents=(run(3),))
    manager.deregister(second.number)
    fourth.report(0, last=False, contents=(run(1),))


def test_the_larger_attempt_stays_wherever_it_lives() -> None:
    """Reported or live, on whichever worker: the smaller one is fenced and its worker told to stop."""
    manager = CacheManager(3)
    here = Reporter(manager, "here")
    here.report(sequences=(sequence("x", 5, 4, 1, 2, attempt=2), sequence("y", 5, 4, 3, 4, attempt=1)))
    there = Reporter(manager, "there")
    there.report(
        sequences=(sequence("x", 5, 4, 1, 2, attempt=1), sequence("y", 5, 4, 3, 4, attempt=2)),
    )
    fenced = [
        (session.worker_id, name)
        for session in manager.sessions
        for (name, _), s in session.sequences.items()
        if s.fenced
    ]
    assert sorted(fenced) == [("here", "y"), ("there", "x")]
    for worker, name in ((here, "y"), (there, "x")):
        (entry,) = worker.session.downlink.pending()
        assert entry.entry == (SequenceKey(name, 1, 0),)
        worker.manager.free(worker.uplink(), [SequenceUpdate(key(name))])
        worker.check()
    assert (manager.reconciled[Case.FENCES], manager.reconciled[Case.FENCED]) == (1, 1)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_attempts_in_one_report_the_larger_stays(order: tuple[int, int]) -> None:
    worker = Reporter()
    tables = {1: (1, 2), 2: (3, 4)}
    worker.report(sequences=tuple(sequence("x", 5, 3, *tables[attempt], attempt=attempt) for attempt in order))
    assert {attempt: s.fenced for (_, attempt), s in worker.session.sequences.items()} == {1: True, 2: False}


def test_of_two_equal_attempts_the_one_that_lives_stays() -> None:
    manager = CacheManager(3)
    Reporter(manager, "here").report(sequences=(sequence("x", 5, 4, 1, 2),))
    late = Reporter(manager, "late")
    late.report(sequences=(sequence("x", 5, 4, 1, 2),))
    assert late.session.sequences["x", 1].fenced


def test_an_interrupted_report_leaves_nothing_behind() -> None:
    """The worker registers again in the middle of it, or never comes back."""
    worker = Reporter()
    worker.report(0, last=False, contents=(run(1, 2, 3),), sequences=(sequence("a", 13, 12, 1, 2, 3, 4),))
    manager = worker.manager
    again = registration("w", num_blocks=17, block_size=SIZE)
    manager.register(again._replace(holds_state=True, register_no=again.register_no + 1), 0.0)
    worker.check()
    assert manager.num_prefix_nodes == 0
    manager.tick(1e9)
    worker.check()
    assert manager.sessions == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"contents": (run(17),)}, "block 17 does not exist"),
        (
            {"contents": (in_blocks(0, (1,), (0,)),)},
            "no manager up to this one has given",
        ),
        (
            {"contents": (in_blocks(0, (1,), ((3 << 40) + 1,)),)},
            "no manager up to this one has given",
        ),
        ({"contents": (in_blocks(0, (1,), ()),)}, "of group 0, got 1 and 0"),
        ({"contents": (in_blocks(1, (1,), (OLD,)),)}, "1 groups, got group 1"),
        ({"reserve": ((), (ReservedBlock(1, OLD),))}, "1 groups, got group 1"),
        ({"contents": (run(1)._replace(tokens=b"1234"),)}, "needs 16 bytes"),
        ({"contents": (run(),)}, "a chain of 0 contents"),
        ({"contents": (run(1, parent=1),)}, "which has not come yet"),
        ({"contents": (run(1, root=None),)}, "needs a root"),
        ({"contents": (run(1, root=Root("other")),)}, "needs a root"),
        ({"contents": (run(1), run(1, first=1))}, "reported twice"),
        ({"contents": (run(1), run(2), run(2, first=1))}, "reported twice"),
        ({"contents": (run(1, 2, 17),)}, "block 17 does not exist"),
        ({"contents": (run(*[0] * 4097),)}, "at most 4096 contents per part"),
        ({"reserve": ((ReservedBlock(1, OLD), ReservedBlock(1, OLD)),)}, "reported twice"),
        ({"contents": (run(1),), "reserve": ((ReservedBlock(1, OLD),),)}, "reported twice"),
        ({"contents": (run(1), run(2)), "reserve": ((ReservedBlock(2, OLD),),)}, "reported twice"),
        ({"sequences": (sequence("a", 5, 4, 1, 2),), "reserve": ((ReservedBlock(2, OLD),),)}, "reported twice"),
        ({"sequences": (sequence("a", 5, 4, 1, 2), sequence("a", 5, 4, 3, 4))}, "reported twice"),
        ({"sequences": (sequence("a", 5, 4, 1, 2), sequence("b", 5, 4, 3, 2))}, "reported twice"),
        ({"sequences": (sequence("a", 9, 4, 1, 2, 2),)}, "is twice in the table"),
        ({"contents": (run(1),), "sequences": (sequence("a", 5, 3, 1, 2),)}, "has not computed it yet"),
        ({"contents": (run(1, first=1),), "sequences": (sequence("a", 5, 4, 1, 2),)}, "holds something else"),
        (
            {
                "contents": (run(1),),
                "sequences": (
                    sequence("a", 5, 4, 1, 2)._replace(tables=((TableEntry(0, 1, 4), TableEntry(1, 2, OLD)),)),
                ),
            },
            "holds something else",
        ),
        ({"sequences": (sequence("a", 5, 9, 1, 2),)}, "9 tokens cannot be computed"),
        ({"sequences": (sequence("a", 9, 9, 1, 2),)}, "9 tokens cannot be computed"),
        ({"sequences": (sequence("a", 5, 4, 1, 2, cached=5),)}, "cannot be computed"),
        ({"sequences": (sequence("a", 0, 0),)}, "needed 1 to"),
        ({"sequences": (sequence("", 5, 4, 1, 2),)}, "needed an id"),
        ({"sequences": (sequence("a", 5, 4, 1, 2, attempt=0),)}, "an attempt from 1 on"),
        ({"sequences": (sequence("a", 5, 4, 1, 2)._replace(root=Root("other")),)}, "another model fingerprint"),
        ({"sequences": (sequence("a", 5, 4, 1, 2)._replace(tables=((TableEntry(1, 1, OLD),),)),)}, "from index 0 on"),
    ],
)
def test_a_report_that_cannot_be_ends_the_session(content: dict[str, object], says: str) -> None:
    """Whatever came before it in the same part goes with it; an empty report of the next session is taken."""
    worker = Reporter()
    worker.report(0, last=False, contents=(run(15, first=90),), sequences=(sequence("before", 3, 2, 16),))
    refusal = worker.refused(1, _moved(content))
    assert refusal.reason is Reason.BAD_REPORT
    assert says in refusal.message
    assert worker.manager.sessions == ()
    assert worker.manager.num_prefix_nodes == 0


def _moved(content: dict[str, object]) -> dict[str, object]:
    """Contents were numbered from 1; one has come before."""
    runs = content.get("contents", ())
    assert isinstance(runs, tuple)
    return {**content, "contents": tuple(one._replace(parent=one.parent + 1) if one.parent else one for one in runs)}

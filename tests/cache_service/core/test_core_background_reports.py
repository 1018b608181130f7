"""A worker is served once it has reported what is in use; what its idle blocks hold follows, while blocks are granted and freed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.manager import REPORT_FIRST_SECONDS, CacheManager
from kvpool.cache_service.core.messages import (
    ContentRun,
    Granted,
    Limits,
    ReportedBlocks,
    ReportedUnit,
    ReportPart,
    Root,
    SequenceUpdate,
    TableEntry,
    WorkerLoad,
)
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.report_turns import MOST_LEASES
from kvpool.cache_service.core.restored import Case
from tests.cache_service.core.contents_follower import ContentsFollower
from tests.cache_service.core.kinds import unit_pool
from tests.cache_service.core.lockstep import FINGERPRINT, key, refused, token_bytes
from tests.cache_service.core.reporter import OLD, ROOT, SIZE, Reporter, chain, reserved, run, sequence

WINDOW = ((0, 0), (5, 2))
"""The second group has a window of two blocks."""


def granted_since(worker: Reporter) -> int:
    """Contents that came after a grant of their blocks, once the report is complete."""
    return worker.manager.reconciled[Case.GRANTED_SINCE]


def test_a_worker_is_served_before_its_cache_is_known() -> None:
    """Its sequence goes on, new ones get blocks, and its own blocks are hits; the idle ones become hits as they come."""
    worker = Reporter()
    worker.live(7, 5, sequences=(sequence("a", 9, 8, 1, 2, 3),), reserve=(reserved(4),))
    assert worker.cached(*range(16)) == 8
    assert not worker.session.recovering
    worker.manager.append(worker.uplink(), [])
    assert worker.allocate("b", [50, 51]).tables[0].blocks == (6,)
    worker.report(1, last=False, contents=(run(1, 2, 5, 7),))
    assert worker.cached(*range(16)) == 16
    assert worker.states(1, 2, 5, 7) == [State.HELD] * 2 + [State.CACHED] * 2
    worker.report(2, idle_blocks=((7, 5),))
    assert (worker.manager.reconciled[Case.CACHED], worker.manager.reconciled[Case.BLOCKLESS]) == (2, 0)


def test_the_cache_of_one_waits_for_what_others_have_in_use() -> None:
    """Their streams wait for it; but not for one that has registered and says nothing."""
    manager = CacheManager(3)
    first, second = Reporter(manager, "first"), Reporter(manager, "second")
    first.live(1)
    refusal = refused(first.report, 1, contents=(run(1),))
    assert refusal.reason is Reason.RECOVERING
    assert "in use" in refusal.message
    second.live(1)
    first.report(1, contents=(run(1),))
    third = Reporter(manager, "third")
    assert refused(second.report, 1, contents=(run(1),)).reason is Reason.RECOVERING
    manager.tick(REPORT_FIRST_SECONDS)
    second.report(1, contents=(run(1),))
    assert third.session.recovering


LEASE, LOOK = 6.0, 0.25
"""Seconds: the lease, and the time between two tries of a report that must wait."""


def seconds_to_report(manager: CacheManager, others: Callable[[float], None], most: float) -> float:
    """How long the contents of a worker wait that is served at 0, while `others` do what they do every moment."""
    worker = Reporter(manager, "waiting")
    worker.live(1)
    for look in range(round(most / LOOK) + 1):
        now = look * LOOK
        for session in manager.sessions:
            manager.keep_alive(session.number, 0, WorkerLoad(), now)
        manager.tick(now)
        others(now)
        try:
            worker.report(1, contents=(run(1),))
        except Refusal as refusal:
            if refusal.reason is not Reason.RECOVERING:
                raise
        else:
            return now
    pytest.fail(f"the report waits after {most} s")


@pytest.mark.parametrize("names", [["again"], [f"new-{number}" for number in range(99)]], ids=["one", "many"])
def test_no_cache_waits_for_a_worker_that_registers_again_and_again(names: list[str]) -> None:
    """Under one name, or each time under another one: it would be the next to report what it has in use, for ever."""
    manager, order = CacheManager(3, lease_seconds=LEASE), itertools.cycle(names)

    def register(now: float) -> None:
        Reporter(manager, next(order), now=now)

    assert seconds_to_report(manager, register, most=20.0) == REPORT_FIRST_SECONDS


@pytest.mark.parametrize("num_endless", [4, 9])
@pytest.mark.parametrize("pace", [None, 0.0, LEASE], ids=["silent", "fast", "slow"])
def test_no_cache_waits_for_reports_that_never_end(num_endless: int, pace: float | None) -> None:
    """They have stated something, and then say nothing, or go on for ever as fast as they can or just in time, or wait for a turn
    as everybody does."""
    manager = CacheManager(3, lease_seconds=LEASE)
    endless = [Reporter(manager, f"endless-{number}") for number in range(num_endless)]
    parts = [0] * num_endless
    due = [0.0] * num_endless
    for worker in endless:
        worker.live(1)

    def go_on(now: float) -> None:
        for number, worker in enumerate(endless):
            if now >= due[number]:
                try:
                    worker.report(1 + parts[number], last=False, contents=(run(0, first=parts[number]),))
                except Refusal:
                    continue
                parts[number] += 1
                due[number] = float("inf") if pace is None else now + pace

    turn = LEASE if pace is None else MOST_LEASES * LEASE
    num_before = -(-num_endless // manager.limits.max_reports_at_once)
    assert seconds_to_report(manager, go_on, most=200.0) <= REPORT_FIRST_SECONDS + num_before * (turn + LOOK)


def test_a_report_that_lost_its_turn_goes_on_with_its_next() -> None:
    """What it has stated is kept."""
    manager = CacheManager(3, lease_seconds=LEASE, limits=Limits(max_reports_at_once=1))
    slow = Reporter(manager, "slow")
    slow.live(1, 2)
    slow.report(1, last=False, contents=(run(1),))
    assert seconds_to_report(manager, lambda now: None, most=20.0) == LEASE + LOOK
    slow.report(2, contents=(run(2, parent=1, first=1),))
    assert manager.worker("slow").num_report_parts == 3
    assert slow.cached(*range(8)) == 8


# -- grants while the report comes in


def test_idle_blocks_are_granted_after_all_other_free_ones_and_the_least_recently_used_first() -> None:
    worker = Reporter(num_blocks=9)
    worker.live(6, 2, 4, reserve=(reserved(1),))
    assert list(worker.session.pools[0].free_list()) == [3, 5, 7, 8, 6, 2, 4]
    assert worker.allocate("a", range(50, 70)).tables[0].blocks == (3, 5, 7, 8, 6)
    worker.report(1, last=False, contents=(run(2), run(4, first=7)))
    worker.report(2, idle_blocks=((4, 2),))
    assert list(worker.session.pools[0].free_list()) == [4, 2]


def test_a_block_that_was_granted_is_not_expected_again_however_late_it_is_listed() -> None:
    """The worker has listed it before it heard of the grant, which has ended by then."""
    worker = Reporter(num_blocks=3)
    worker.live(1, 2)
    assert worker.allocate("a", [50]).tables[0].blocks == (1,)
    worker.free("a")
    worker.report(1, last=False, idle_blocks=((1, 2),))
    worker.report(2, contents=(run(1, 2),))
    assert worker.states(1, 2) == [State.FREE, State.CACHED]
    assert worker.cached(*range(4)) == 0


@pytest.mark.parametrize("is_listed_first", [True, False])
def test_idle_blocks_may_be_listed_before_or_after_what_some_of_them_hold_or_who_has_them(
    is_listed_first: bool,
) -> None:
    """Free blocks come before cached ones whatever the order; and a block of a table is no block that a content may come for."""
    worker = Reporter()
    worker.report(0, last=False, contents=() if is_listed_first else (run(1, first=5),), idle_blocks=((1, 2),))
    assert list(worker.session.pools[0].free_list())[-1] == (2 if is_listed_first else 1)
    worker.report(1, last=False, idle_blocks=((3, 4),))
    worker.report(2, last=False, live=True, sequences=(sequence("a", 5, 4, 3, 4),))
    worker.report(3, contents=(run(3),))
    assert worker.states(1, 2, 3, 4) == [
        State.FREE if is_listed_first else State.CACHED,
        State.FREE,
        State.HELD,
        State.HELD,
    ]
    assert granted_since(worker) == 0, "the table has said what the block holds"


def test_a_content_under_another_root_is_not_what_a_table_says_of_its_block() -> None:
    """Equal tokens of two tenants: what hangs from the one would become a hit for the other."""
    worker = Reporter()
    worker.report(0, last=False, sequences=(sequence("a", 5, 4, 1, 2),))
    said = worker.bad_report(1, contents=(run(1, root=ROOT._replace(tenant_salt="another")),))
    assert "block 1 is reported twice" in said


def test_a_window_that_the_worker_has_used_since_is_not_evicted_first() -> None:
    """A sequence has hit it and left it, so it went before the others; then the worker lists it as used last."""
    worker = Reporter(num_blocks=(9, 9), windows=WINDOW)
    worker.live(idle_blocks=((1, 2), (3, 4)))
    worker.report(1, last=False, contents=(chain((1, 2), (3, 4)),))
    assert worker.allocate("a", [*range(8), *[99] * 6]).num_cached_tokens == 8
    worker.append(SequenceUpdate(key("a"), num_computed_tokens=12, released=((), (TableEntry(1, 4, OLD),))))
    pool = worker.session.pools[1]
    assert pool.demoted() == [4]
    worker.report(2, idle_blocks=((), (3, 4)))
    assert pool.demoted() == []
    assert list(pool.free_list())[-2:] == [3, 4]


def test_expected_blocks_are_not_granted_in_place_of_new_ones_so_they_save_nothing_of_the_budget() -> None:
    """Four blocks are expected in the first group. The budget has room for three new ones, of which the second needs two."""
    worker = Reporter(CacheManager(3, limits=Limits(max_total_blocks=4 + 3)), num_blocks=(9, 9), windows=WINDOW)
    worker.live(1, 2, 3, 4)
    outcome = worker.ask("a", range(8))
    assert isinstance(outcome, Refusal)
    assert outcome.reason is Reason.TOO_MANY_BLOCKS
    worker.check()


def test_a_content_that_was_computed_again_meanwhile_has_one_block() -> None:
    worker = Reporter()
    worker.live(1, 2)
    worker.allocate("again", [*range(4), 99])
    worker.free("again", num_computed_tokens=4)
    worker.report(1, contents=(run(1, 2),))
    assert worker.manager.reconciled[Case.DUPLICATE] == 1
    assert worker.states(1, 2, 3) == [State.FREE, State.CACHED, State.CACHED]
    assert worker.cached(*range(8)) == 8


def test_a_chain_whose_beginning_has_left_the_tree_is_made_anew() -> None:
    """Two groups with windows. The first evicts what it holds of a chain; then comes the rest of it, of which the other holds a
    block."""
    worker = Reporter(num_blocks=(4, 9), windows=((5, 2), (5, 2)))
    worker.live(idle_blocks=((1,), (3,)))
    worker.report(1, last=False, contents=(chain((1,), (0,)),))
    assert worker.manager.num_prefix_nodes == 1
    for name in "abc":
        worker.allocate(name, [50])
    assert not worker.session.pools[0].is_cached(1)
    assert worker.manager.num_prefix_nodes == 0
    worker.report(2, contents=(chain((0,), (3,), parent=1, first=1),))
    assert worker.session.pools[1].is_cached(3)
    worker.manager.deregister(worker.number)
    worker.check()
    assert worker.manager.num_prefix_nodes == 0


@pytest.mark.parametrize("late", [{"sequences": (sequence("a", 5, 4, 1, 2),)}, {"reserve": (reserved(3),)}], ids=str)
def test_sequences_and_reserve_come_before_the_worker_is_served(late: dict[str, Any]) -> None:
    worker = Reporter()
    worker.live(5)
    assert "before the worker is served" in worker.bad_report(1, **late)


def test_what_never_comes_is_free_in_the_end() -> None:
    worker = Reporter(num_blocks=5)
    worker.live(3, 4)
    worker.report(1, contents=(run(4),))
    assert worker.session.pools[0].expected() == []
    assert list(worker.session.pools[0].free_list()) == [3, 1, 2, 4]


def test_without_room_in_the_budget_the_rest_of_the_cache_is_left_out_and_the_worker_is_served() -> None:
    """Contents without blocks count like blocks; the worker's sequences are worth more than its cache."""
    worker = Reporter(CacheManager(3, limits=Limits(max_total_blocks=6)))
    worker.live(1, 2, 3, sequences=(sequence("a", 5, 4, 4, 5),))
    worker.report(1, last=False, contents=(run(1, first=9),))
    worker.report(2, last=False, contents=(run(0, 0, 2, first=20),))
    assert worker.session.pools[0].expected() == [3], "what is left out is as free as any block"
    worker.report(3, contents=(run(3, parent=4, first=30),))
    assert worker.manager.reconciled[Case.NO_ROOM] == 2
    assert worker.states(1, 2, 3, 4) == [State.CACHED, State.FREE, State.FREE, State.HELD]
    assert worker.session.sequences


def test_a_window_is_of_no_use_once_the_full_block_of_it_was_granted() -> None:
    """Both were idle when the report began; the group without a window has granted its block since."""
    worker = Reporter(num_blocks=(3, 9), windows=WINDOW)
    worker.live(idle_blocks=((1, 2), (3, 4)))
    assert worker.allocate("a", [50, 51]).tables[0].blocks == (1,)
    worker.report(1, contents=(chain((1,), (3,)), chain((2,), (4,), first=7)))
    assert (worker.manager.reconciled[Case.DEPENDENT], worker.manager.reconciled[Case.CACHED]) == (1, 2)
    assert worker.session.pools[1].is_cached(4)
    assert worker.session.pools[1].is_free(3)


def test_a_unit_of_which_a_block_was_granted_is_left_out() -> None:
    worker = Reporter(num_blocks=(9, 5), max_encoder_tokens=16)
    worker.live(idle_blocks=((), (1, 2, 3, 4)))
    first, second, third = (Root(FINGERPRINT, input_digest=bytes([number]) * 32) for number in range(3))
    assert worker.allocate("a", [50], third, num_encoder_tokens=4).tables[1].blocks == (1,)
    worker.report(1, units=(ReportedUnit(first, 1, reserved(1, 2)), ReportedUnit(second, 1, reserved(3, 4))))
    assert granted_since(worker) == 2
    pool = unit_pool(worker.session)
    assert pool is not None
    assert len(pool.cached_units()) == 1
    assert pool.is_free(2)


def contents_of(num_blocks: int, rng: random.Random) -> dict[int, tuple[int, tuple[int, ...]]]:
    """What a worker's blocks hold: by block, the generation of the grant and all tokens up to its end."""
    chains = [[rng.randrange(2) for _ in range(4 * SIZE)] for _ in range(4)]
    blocks = rng.sample(range(1, num_blocks), num_blocks // 2)
    return {block: (OLD, tuple(rng.choice(chains)[: SIZE * rng.randint(1, 4)])) for block in blocks}


@pytest.mark.parametrize("seed", range(40))
def test_every_hit_is_what_the_worker_has_whatever_happens_between_the_parts(seed: int) -> None:
    """Sequences come and go while the report comes in, its parts built from what was true at the beginning, as a slow worker's are.
    A follower of the contents knows the same."""
    rng = random.Random(seed)
    num_blocks = rng.choice([9, 14, 20])
    truth = contents_of(num_blocks, rng)
    worker = Reporter(num_blocks=num_blocks)
    follower = ContentsFollower(seed)
    parts = [ReportPart(0, False, idle_blocks=(tuple(truth),), live=True)]
    numbers: dict[tuple[int, ...], int] = {(): 0}
    for block, (_, tokens) in truth.items():
        for end in range(SIZE, len(tokens) + 1, SIZE):
            if end < len(tokens) and tokens[:end] in numbers:
                continue
            number = len(parts)
            parent = numbers[tokens[: end - SIZE]]
            blocks = ReportedBlocks(0, (block if end == len(tokens) else 0,), (OLD if end == len(tokens) else 0,))
            content = ContentRun(parent, None if parent else ROOT, token_bytes(tokens[end - SIZE : end]), 1, (blocks,))
            parts.append(ReportPart(number, False, (content,)))
            numbers[tokens[:end]] = number
    parts.append(ReportPart(len(parts), True, idle_blocks=(tuple(truth),)))
    living: list[tuple[str, list[int]]] = []
    names = iter(range(1000))
    while parts or living:
        dice = rng.random()
        if parts and dice < 0.4:
            worker.manager.report(worker.uplink(), parts[0])
            if rng.random() < 0.8:  # else its answer is lost, and it comes again
                parts.pop(0)
            if parts and rng.random() < 0.3:
                worker.manager.sweep()
        elif parts and dice < 0.75 and not worker.session.recovering:
            prompt = [*rng.choice(list(numbers)), *(rng.randrange(2) for _ in range(rng.randint(1, 6)))]
            name = str(next(names))
            outcome = worker.ask(name, prompt)
            if isinstance(outcome, Granted):
                living.append((name, prompt))
                (table,) = outcome.tables
                for index, (block, generation) in enumerate(zip(table.blocks, table.generations, strict=True)):
                    end = (index + 1) * SIZE
                    if end <= outcome.num_cached_tokens:
                        assert truth[block] == (generation, tuple(prompt[:end]))
                    else:
                        assert generation > truth.get(block, (0,))[0]
                        truth[block] = generation, tuple(prompt[:end])
        elif living:
            name, prompt = living.pop(rng.randrange(len(living)))
            worker.manager.free(worker.uplink(), [SequenceUpdate(key(name), num_computed_tokens=len(prompt))])
        follower.follow(worker.manager)
        assert worker.manager.check().violations == []
    worker.check()
    follower.follow(worker.manager, now=True)

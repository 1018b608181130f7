"""The laws of the scheduler, whatever happens in what order: budget, blocks, pace, order, fairness; nobody starves or is lost."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.cache_service.core.messages import Limits
from kvpool.worker_service.cache.engine_cache import EngineCache
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.engine.errors import EngineError
from kvpool.worker_service.engine.fairness import MAX_IDLE_ACCOUNTS, Fairness
from kvpool.worker_service.engine.policy import SchedulingPolicy
from kvpool.worker_service.engine.request import Payer
from tests.worker_service.scheduler_world import SchedulerWorld

POLICIES = st.sampled_from(list(SchedulingPolicy))
TENANTS = st.sampled_from(["", "a", "b"])


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of events; `SchedulerWorld` checks each decision, the invariant the books."""

    world: SchedulerWorld

    @initialize(
        scheduling_policy=POLICIES,
        num_blocks=st.sampled_from([8, 12, 40]),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.sampled_from([0, 1, 5, 40]),
        max_mixed_prefill_tokens=st.sampled_from([1, 3, 7, 64]),
    )
    def begin(self, max_num_seqs: int, spare_budget: int, **more: Any) -> None:
        self.world = SchedulerWorld(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + spare_budget, **more
        )

    @rule(
        num_prompt=st.integers(1, 20),
        num_shared=st.sampled_from([0, 0, 9, 18]),
        num_new=st.integers(1, 9),
        n=st.sampled_from([1, 1, 1, 2, 4, 7]),
        num_beams=st.sampled_from([1, 1, 1, 2, 3, 4]),
        tenant=TENANTS,
        priority=st.integers(-1, 1),
    )
    def submit(self, num_prompt: int, num_new: int, n: int, num_beams: int, **more: Any) -> None:
        """For one answer, for several, or for a search. Some never fit."""
        n = min(n, num_beams) if num_beams > 1 else n
        with contextlib.suppress(EngineError):
            self.world.submit(num_prompt, num_new, n=n, num_beams=num_beams, **more)

    @rule(lose_answer=st.sampled_from([False, False, True]))
    def talk(self, lose_answer: bool) -> None:
        self.world.talk(lose_answer=lose_answer)

    @precondition(lambda self: not self.world.batch)
    @rule()
    def launch(self) -> None:
        self.world.begin_step()

    @precondition(lambda self: self.world.batch)
    @rule()
    def land(self) -> None:
        self.world.end_step()

    @precondition(lambda self: not self.world.batch)
    @rule(count=st.integers(1, 12), is_talking=st.booleans())
    def steps(self, count: int, is_talking: bool) -> None:
        """Nothing happens but steps, with answers of the manager between them or without."""
        for _ in range(count):
            if is_talking:
                self.world.talk()
            self.world.whole_step()

    @rule()
    def send(self) -> None:
        self.world.send()

    @precondition(lambda self: self.world.requests)
    @rule(which=st.integers(0, 1 << 30), again=st.booleans())
    def cancel(self, which: int, again: bool) -> None:
        """In whatever state it is, also when it has ended; perhaps another one takes its name."""
        request = self.world.requests[which % len(self.world.requests)]
        self.world.cancel(request)
        if again:
            with contextlib.suppress(EngineError):
                self.world.submit(5, 3, name=request.params.sequence_id)

    @rule()
    def cut(self) -> None:
        """The manager is away, or back."""
        self.world.is_away = not self.world.is_away

    @invariant()
    def books(self) -> None:
        if hasattr(self, "world"):
            self.world.check_books()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            if self.world.batch:
                self.world.end_step()
            self.world.run_dry()


TestSchedulerMachine: Any = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=50, stateful_step_count=40)


@settings(max_examples=20)
@given(
    num_blocks=st.sampled_from([8, 24, 200]),
    names=st.sampled_from([1, 3, 1 << 30]),
    num_served=st.integers(0, 6),
    shape=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=5),
    policy=POLICIES,
)
def test_nobody_starves_however_long_a_flood_lasts(
    num_blocks: int, names: int, num_served: int, shape: list[tuple[int, int]], policy: SchedulingPolicy
) -> None:
    """A request among a flood of its level that never ends: of tenants with few names or always new ones, into a pool that is too
    small, after its tenant has had much more than others. It ends after a bounded amount of others' work."""
    num_waiting = 6
    world = SchedulerWorld(num_blocks=num_blocks, scheduling_policy=policy)
    for _ in range(num_served):
        world.submit(20, 6, tenant="v")
    number = 0

    def flood() -> None:
        nonlocal number
        while world.scheduler.num_waiting < num_waiting:
            world.submit(*shape[number % len(shape)], tenant=f"t{number % names}")
            number += 1

    flood()
    one = world.submit(20, 6, tenant="v")
    # All that its tenant has had or may get before it, and the same for each of those that may be there at a time, computed again
    # as often as the pool's size makes necessary.
    ahead = (num_served + 1) * 26 + world.scheduler.max_num_seqs * 26
    num_at_once = num_waiting + num_served + 1 + world.scheduler.max_num_seqs
    bound = world.num_computed + 4 * ahead * num_at_once
    while one in world.open:
        world.turns()
        flood()
        assert world.num_computed < bound, "starved"


@settings(max_examples=15)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8)), min_size=2, max_size=4),
    depths=st.lists(st.integers(5, 12), min_size=4, max_size=4),
    mixed=st.sampled_from([4, 16, 256]),
    policy=POLICIES,
)
def test_tenants_that_always_ask_get_equal_shares(
    shapes: list[tuple[int, int]], depths: list[int], mixed: int, policy: SchedulingPolicy
) -> None:
    """Each tenant has its own sizes of prompts and answers, and more requests that wait than there are places. None is ever ahead
    of another by more than its sequences in the batch can make, and one prompt."""
    world = SchedulerWorld(
        num_blocks=2000,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_mixed_prefill_tokens=mixed,
        scheduling_policy=policy,
    )
    tenants = [f"t{index}" for index in range(len(shapes))]
    longest = max(num_prompt for num_prompt, _ in shapes)
    most_new = max(num_new for _, num_new in shapes)
    bound = longest + 4 * most_new + longest
    for _ in range(60):
        for tenant, shape, depth in zip(tenants, shapes, depths, strict=False):
            missing = depth - sum(request.params.tenant == tenant for request in world.scheduler.waiting)
            for _ in range(missing):
                world.submit(*shape, tenant=tenant)
        world.turns()
        shares = [world.computed[tenant] for tenant in tenants]
        assert max(shares) - min(shares) <= bound, shares


@given(
    lengths=st.lists(st.integers(100, 400), min_size=2, max_size=6),
    mixed=st.sampled_from([8, 64]),
    is_decoding=st.booleans(),
)
@settings(max_examples=20)
def test_prompts_of_two_tenants_share_the_steps(lengths: list[int], mixed: int, is_decoding: bool) -> None:
    """All have their places already. While both have something to compute, neither is ahead by more than a step."""
    world = SchedulerWorld(
        num_blocks=10_000, max_num_seqs=8, max_num_batched_tokens=100, max_mixed_prefill_tokens=mixed
    )
    if is_decoding:
        world.submit(1, 1000, tenant="c")
    for index, length in enumerate(lengths):
        world.submit(length, 1, tenant="b" if index == len(lengths) - 1 else "a")
    world.talk()
    before = world.computed.copy()
    while {"a", "b"} <= {r.params.tenant for r in world.scheduler if r.num_uncomputed_tokens > 1}:
        shares = [world.computed[tenant] - before[tenant] for tenant in "ab"]
        assert abs(shares[0] - shares[1]) <= (mixed if is_decoding else 100), shares
        world.whole_step()


def test_a_tenant_that_was_idle_gets_no_credit_for_it() -> None:
    """Whoever begins to ask is served like the others from then on, not until it has caught up; even if something of it ran."""
    world = SchedulerWorld(num_blocks=1000, max_num_seqs=3)
    world.submit(1, 400, tenant="back")
    for _ in range(80):
        world.submit(10, 2, tenant="busy")
    world.turns(30)
    before = world.computed.copy()
    assert before["busy"] - before["back"] > 150
    for _ in range(30):
        world.submit(10, 2, tenant="back")
    world.turns(30)
    shares = [world.computed[tenant] - before[tenant] for tenant in ("busy", "back")]
    assert min(shares) > 80
    assert abs(shares[0] - shares[1]) <= 40, shares


def test_using_what_nobody_wants_costs_nothing() -> None:
    """While nobody waits, accounts are closed: having been alone is no debt."""
    world = SchedulerWorld(num_blocks=1000, max_num_seqs=2)
    for _ in range(20):
        world.submit(10, 3, tenant="alone")
        world.run_dry()
    for _ in range(20):
        world.submit(10, 2, tenant="alone")
        world.submit(10, 2, tenant="other")
    before = world.computed["alone"]
    world.turns(25)
    assert abs(world.computed["alone"] - before - world.computed["other"]) <= 30


def test_accounts_of_tenants_that_are_gone_are_forgotten() -> None:
    """A tenant's name may be new each time; memory does not grow with it, whether they come one after another or all at once."""
    fairness = Fairness()
    stays = Payer(0, "stays")
    fairness.enter(stays)
    accounts = fairness._levels[0]
    for number in range(5_000):
        fairness.enter(Payer(0, str(number)))
        accounts.charge({str(number): 1 + number % 1000})
        fairness.settle([stays])
    assert len(accounts._tokens) <= 100
    many = [f"one of many {number}" for number in range(6_000)]
    for tenant in many:
        fairness.enter(Payer(0, tenant))
    accounts.charge(dict.fromkeys(many, 1000))
    fairness.settle([stays])
    assert len(accounts._tokens) == 1 + MAX_IDLE_ACCOUNTS
    fairness.settle([])
    assert not fairness._levels


def test_a_request_that_ends_in_a_step_has_no_more_of_it_also_if_another_one_has_its_name_by_then() -> None:
    world = SchedulerWorld()
    request = world.submit(5, 9)
    world.turns(2)
    world.begin_step()
    world.cancel(request)
    again = world.submit(5, 3, name=request.params.sequence_id)
    world.end_step()
    assert not again.num_generated
    world.run_dry()


def test_a_grant_whose_answer_was_lost_is_asked_for_again_even_while_the_pool_is_exhausted() -> None:
    """The manager holds blocks for a sequence that this worker takes for waiting; nobody else can use or free them."""
    world = SchedulerWorld(num_blocks=33, block_size=1)
    world.submit(10, 20)
    world.turns()
    world.submit(20, 2)
    world.talk(lose_answer=True)
    for _ in range(30):
        world.whole_step()
    world.run_dry()


def test_prompts_next_to_a_decode_without_a_block_keep_its_pace() -> None:
    """A sequence that decodes and has no block just now may get one while the step runs: the step must stay as short."""
    world = SchedulerWorld(num_blocks=40, block_size=4, max_num_batched_tokens=32, max_mixed_prefill_tokens=8)
    decoding = world.submit(4, 8)
    world.turns()
    world.submit(30, 1)
    world.talk()
    with world.with_spare(0):
        batch = world.whole_step()
    assert decoding.num_generated == 1, "the fifth token needs a block"
    assert [part.num_tokens for part in batch] == [8]


def test_a_prompt_whose_grant_was_not_answered_counts_for_its_tenant() -> None:
    """It has a place already, and will be computed: the next place is another tenant's."""
    world = SchedulerWorld(num_blocks=200, max_num_seqs=2)
    world.submit(100, 1, tenant="a")
    world.talk(lose_answer=True)
    world.submit(10, 1, tenant="a")
    world.submit(10, 1, tenant="b")
    assert [sequence.id.sequence_id for sequence in world.scheduler.candidates()] == ["0", "2"]


def test_a_tenant_that_decodes_in_a_step_has_had_that_much_of_it() -> None:
    """Two prompts of two tenants with equal accounts: the tenant that also decodes in this step comes second."""
    world = SchedulerWorld(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=64, max_mixed_prefill_tokens=4)
    world.submit(1, 50, tenant="a")
    world.turns()
    second = world.submit(40, 1, tenant="a")
    third = world.submit(40, 1, tenant="b")
    world.talk()
    batch = world.whole_step()
    prefilled = [part.request for part in batch if part.num_tokens > 1]
    assert prefilled == [third], f"{second} was computed first"


# -- what the drawn tests meet too seldom: groups of beams, and answers


def test_a_group_that_is_preempted_between_its_beams_forgets_what_some_of_them_had_computed() -> None:
    """Only two of three beams find a block, the third one's comes too late: the group is taken away before."""
    world = SchedulerWorld(num_blocks=24, block_size=1, max_num_seqs=6)
    group = world.submit(2, 5, n=3, num_beams=3)
    worse = world.submit(2, 12)
    world.turns(3)
    assert len(group.sequences) == 3
    assert worse in world.scheduler._running
    with world.with_spare(2):
        batch = world.begin_step()
    assert [part.request for part in batch] == [group, group]
    world.end_step()
    world.preempt(group, world.now)
    world.run_dry()
    assert group.num_preemptions == 1


def test_a_request_alone_keeps_its_blocks_and_waits_for_those_that_are_on_their_way() -> None:
    """Unless only its end can bring them back: test_forks_over_core.py."""
    world = SchedulerWorld(num_blocks=24, block_size=1, max_num_seqs=6)
    group = world.submit(2, 5, n=3, num_beams=3)
    world.turns(3)
    assert len(group.sequences) == 3
    world.talk()
    world.cache.state.pool_is_empty = [True]
    with world.with_spare(0):
        assert not world.begin_step()
    assert not group.num_preemptions
    world.run_dry()


def test_what_comes_back_with_the_last_preemption_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks that the manager does not know give their blocks back without a call, when the last that needs them has ended. The
    first request was passed over by then, and no reply would wake the engine."""
    world = SchedulerWorld(num_blocks=12, block_size=1)
    first, *others = [world.submit(2, 9) for _ in range(3)]
    world.turns(3)
    assert world.scheduler.num_running == 3
    free = world.cache.free

    def free_late(sequence: CacheSequence) -> None:
        free(sequence)
        if world.scheduler._running.last is first:
            world.talk()

    monkeypatch.setattr(world.cache, "free", free_late)
    # Those that have ended wait for each other, so nothing is on its way.
    monkeypatch.setattr(EngineCache, "is_exhausted", property(lambda cache: not cache.num_spare_blocks[0]))
    batch = world.scheduler.schedule(0.0)
    assert [part.request for part in batch] == [first]
    assert [other.num_preemptions for other in others] == [1, 1]


@pytest.mark.parametrize("max_num_seqs", [4, 5, 9])
def test_answers_take_the_places_that_their_request_was_admitted_with(max_num_seqs: int) -> None:
    """Those for which the batch has places share the prompt at once, the others wait."""
    world = SchedulerWorld(max_num_seqs=max_num_seqs, max_num_batched_tokens=40)
    request = world.submit(6, 9, n=6)
    world.turns()
    assert world.scheduler.num_running == min(6, max_num_seqs)
    assert world.scheduler.num_waiting == 6 - world.scheduler.num_running
    assert len(request.answers) == 6
    world.run_dry()


@pytest.mark.parametrize(
    "limits", [Limits(max_sequences_per_session=1), Limits(max_total_blocks=12)], ids=["sequences", "blocks"]
)
def test_a_refused_allocate_is_not_repeated_before_something_has_changed(limits: Limits) -> None:
    """What it was granted for the reserve goes back with the next call, and that is no reason to ask again."""
    world = SchedulerWorld(limits=limits)
    for _ in range(6):
        world.submit(6, 6)
    world.run_dry()

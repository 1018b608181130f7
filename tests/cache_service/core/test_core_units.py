"""Units: the KV of an encoder's input is shared between equal inputs, and is whole or not at all."""

from __future__ import annotations

import gc
from hashlib import sha256

import pytest

from kvpool.cache_service.core import block_mirror
from kvpool.cache_service.core.block_mirror import BlockMirror
from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.description import describe_block
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.groups.unit import UnitSpec
from kvpool.cache_service.core.groups.unit_pool import UnitPool
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Appended,
    AppendItem,
    Granted,
    GroupSpec,
    Layout,
    ReservedBlock,
    Root,
    SequenceUpdate,
    TableEntry,
    Wait,
)
from kvpool.cache_service.core.prefix_tree import RootNode
from kvpool.cache_service.core.refusal import Reason
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.kinds import unit_pool
from tests.cache_service.core.lockstep import Lockstep, key, refused, registration, token_bytes
from tests.cache_service.core.model import Refused

SIZE = 4
CROSS = 1
"""Index of the group with cross attention."""


def root_of(text: str) -> Root:
    """The root of sequences with this input of the encoder."""
    return ROOT._replace(input_digest=sha256(text.encode()).digest())


INPUT, OTHER = root_of("an input"), root_of("another one")


def desk(num_unit_blocks: int = 9, num_blocks: int = 33, **more: object) -> Desk:
    """A worker with a group of the decoder's KV, and one with cross attention, for inputs of 32 tokens at most."""
    return Desk((num_blocks, num_unit_blocks), SIZE, max_encoder_tokens=32, **more)  # type: ignore[arg-type]


def asks(at: Desk, name: str, root: Root = INPUT, count: int = 10, tokens: object = (1,), **more: object) -> object:
    """An Allocate of a sequence with an input of `count` tokens."""
    return at.allocate(name, list(tokens), root=root, num_encoder_tokens=count, **more)  # type: ignore[call-overload]


def granted(at: Desk, name: str, root: Root = INPUT, count: int = 10, **more: object) -> Granted:
    """The same, which is granted."""
    outcome = asks(at, name, root, count, **more)
    assert isinstance(outcome, Granted), outcome
    return outcome


def unit_of(grant: Granted) -> tuple[int, ...]:
    """The table that it has granted in the group with cross attention."""
    return grant.tables[CROSS].blocks


def encoded(name: str, num_computed_tokens: int = 0) -> SequenceUpdate:
    """The encoder has run for a sequence."""
    return SequenceUpdate(key(name), 0, b"", num_computed_tokens, encoder_computed=True)


def run_encoder(at: Desk, name: str, num_computed_tokens: int = 0) -> None:
    """State that."""
    assert isinstance(at.tell(encoded(name, num_computed_tokens)), Appended)


def states(at: Desk) -> list[str]:
    """Of the blocks of the group with cross attention, from block 1 on."""
    pool = at.session.pools[CROSS]
    return [pool.state(block).name for block in range(1, pool.num_blocks)]


def test_a_unit_has_as_many_blocks_as_the_encoders_input_needs_whatever_the_decoder_computes() -> None:
    worker = desk()
    grant = granted(worker, "a", count=10, tokens=range(7))
    assert (grant.tables[0].blocks, unit_of(grant), grant.encoder_cached) == ((1, 2), (1, 2, 3), False)


def test_the_second_sequence_with_an_input_gets_the_first_ones_blocks() -> None:
    worker = desk()
    first = granted(worker, "a")
    run_encoder(worker, "a")
    second = granted(worker, "b", tokens=(2,))
    assert (unit_of(second), second.encoder_cached) == (unit_of(first), True)
    assert worker.session.counts()[CROSS].shared == 3


def test_a_unit_is_no_hit_before_the_encoder_has_run() -> None:
    worker = desk()
    granted(worker, "a")
    assert asks(worker, "b", tokens=(2,)) == Wait(key("a"), 0)
    assert worker.session.counts()[CROSS].held == 3, "who waits holds nothing"


def test_a_unit_outlives_its_sequences() -> None:
    worker = desk()
    first = granted(worker, "a")
    worker.leave(encoded("a"))
    assert states(worker)[:3] == ["CACHED"] * 3
    again = granted(worker, "b")
    assert (unit_of(again), again.encoder_cached) == (unit_of(first), True)


def test_what_a_sequence_has_not_computed_at_its_end_is_free() -> None:
    worker = desk()
    granted(worker, "a")
    worker.free("a")
    assert set(states(worker)) == {"FREE"}
    assert worker.manager.num_prefix_nodes == 0
    assert worker.manager._tree.roots() == []


def test_a_cached_unit_keeps_its_root_and_nothing_else_does() -> None:
    worker = desk()
    granted(worker, "a")
    worker.leave(encoded("a"))
    (root,) = worker.manager._tree.roots()
    assert isinstance(root, RootNode)
    assert root.key == (INPUT, SIZE)
    granted(worker, "b", OTHER, count=32)
    assert [one.key for one in worker.manager._tree.roots()] == [(OTHER, SIZE)]


def test_evicting_one_block_of_a_unit_evicts_all_of_it() -> None:
    """The pool has 8 blocks: a unit of 3, another of 4, and then one of 2 is wanted."""
    worker = desk()
    granted(worker, "a", count=12)
    worker.leave(encoded("a"))
    granted(worker, "b", OTHER, count=16)
    worker.leave(encoded("b"))
    third = granted(worker, "c", root_of("a third"), count=5)
    assert unit_of(third) == (1, 2), "one block was free, so the oldest unit has gone"
    assert states(worker) == ["HELD", "HELD", "FREE", "CACHED", "CACHED", "CACHED", "CACHED", "FREE"]
    assert worker.session.pools[CROSS].num_evicted == 3
    worker.free("c")
    assert not granted(worker, "a", count=12).encoder_cached
    assert granted(worker, "b", OTHER, count=16).encoder_cached


def test_what_an_evicted_unit_leaves_over_is_granted_before_another_unit_is_evicted() -> None:
    worker = desk()
    for name, root in (("a", INPUT), ("b", OTHER)):
        granted(worker, name, root, count=16)
        worker.leave(encoded(name))
    granted(worker, "c", root_of("a third"), count=4)
    granted(worker, "d", root_of("a fourth"), count=12)
    assert granted(worker, "e", OTHER, count=16).encoder_cached


def test_pictures_show_what_is_left_of_an_evicted_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_mirror, "SLICE_BLOCKS", 2)
    worker = desk()
    for name, root in (("a", INPUT), ("b", OTHER)):
        granted(worker, name, root, count=16)
        worker.leave(encoded(name))
    pool = unit_pool(worker.session)
    assert pool is not None
    mirror = BlockMirror(worker.session, CROSS, worker.manager.salts, 1)
    mirror.take(1, 0)
    granted(worker, "c", root_of("a third"), count=4)
    mirror.take(2, 0)
    columns = mirror.since(0)
    assert columns is not None
    assert list(columns.states) == [pool.state(block) for block in range(pool.num_known)]
    assert columns.states.count(State.FREE) == 1 + 3


def test_several_units_go_where_one_is_not_enough() -> None:
    worker = desk()
    for name, root in (("a", INPUT), ("b", OTHER)):
        granted(worker, name, root, count=16)
        worker.leave(encoded(name))
    assert sorted(unit_of(granted(worker, "c", root_of("a third"), count=20))) == [1, 5, 6, 7, 8]
    assert states(worker).count("FREE") == 3


def test_a_unit_that_is_used_again_is_evicted_later() -> None:
    worker = desk()
    for name, root in (("a", INPUT), ("b", OTHER)):
        granted(worker, name, root, count=16)
        worker.leave(encoded(name))
    granted(worker, "a", INPUT, count=16)
    worker.free("a")
    granted(worker, "c", root_of("a third"), count=4)
    assert granted(worker, "d", INPUT, count=16).encoder_cached


def test_a_hit_needs_no_block_of_a_pool_that_is_full() -> None:
    worker = desk()
    granted(worker, "a", count=32)
    run_encoder(worker, "a")
    assert granted(worker, "b", count=32).encoder_cached
    assert isinstance(asks(worker, "c", OTHER), Refused)


def test_too_few_blocks_for_a_unit_refuse_the_sequence_and_evict_nothing() -> None:
    """The unit that could be evicted, of 4 blocks, stays, and so does the decoder's pool."""
    worker = desk()
    granted(worker, "a", count=16)
    worker.leave(encoded("a"))
    granted(worker, "b", OTHER, count=8)
    assert asks(worker, "c", root_of("a third"), count=32) == Refused(Reason.NO_BLOCKS)
    assert granted(worker, "d", count=16).encoder_cached


def test_the_decoders_pool_evicts_no_unit_and_the_units_evict_nothing_of_the_decoder() -> None:
    worker = desk(num_blocks=5)
    granted(worker, "a", tokens=range(9))
    worker.leave(encoded("a", 9))
    granted(worker, "b", root_of("a third"), tokens=range(16), count=20)
    assert worker.session.counts()[CROSS].cached == 3, "the decoder's pool was full of other tokens"
    worker.free("b")
    granted(worker, "c", OTHER, count=32)
    assert worker.session.counts()[0].cached == 0


def test_a_decoders_prefix_hits_although_its_unit_is_evicted() -> None:
    """The encoder runs again, and the decoder computes only what is not cached."""
    worker = desk()
    granted(worker, "a", tokens=range(9))
    worker.leave(encoded("a", 9))
    granted(worker, "b", OTHER, count=32)
    worker.free("b")
    again = granted(worker, "c", tokens=range(9))
    assert (again.num_cached_tokens, again.encoder_cached) == (8, False)


def test_decoder_prefixes_of_different_inputs_are_different() -> None:
    worker = desk()
    granted(worker, "a", tokens=range(9))
    run_encoder(worker, "a", 9)
    other = granted(worker, "b", OTHER, tokens=range(9))
    assert (other.num_cached_tokens, other.encoder_cached) == (0, False)
    assert set(unit_of(other)).isdisjoint({1, 2, 3})


def test_equal_inputs_under_different_salts_share_nothing() -> None:
    worker = desk()
    granted(worker, "a")
    run_encoder(worker, "a")
    assert not granted(worker, "b", INPUT._replace(tenant_salt="another")).encoder_cached


def test_a_sequence_that_waits_for_a_prefix_is_not_told_to_wait_for_the_unit_too() -> None:
    worker = desk()
    granted(worker, "a", tokens=range(9))
    assert asks(worker, "b", tokens=range(9)) == Wait(key("a"), 8)
    run_encoder(worker, "a")
    assert asks(worker, "b", tokens=range(9)) == Wait(key("a"), 8)
    assert isinstance(asks(worker, "c", tokens=(5,)), Granted)


def test_a_sequence_does_not_wait_for_the_encoder_of_another_worker() -> None:
    """The root is common to all workers, what is computed under it is not."""
    lockstep = Lockstep()
    workers = [desk(worker_id=name, lockstep=lockstep) for name in ("one", "two")]
    granted(workers[0], "a")
    assert not granted(workers[1], "b").encoder_cached


def test_who_may_not_wait_gets_a_unit_of_its_own() -> None:
    worker = desk()
    first, second = granted(worker, "a"), granted(worker, "b", no_wait=True)
    assert set(unit_of(first)).isdisjoint(unit_of(second))
    run_encoder(worker, "b")
    run_encoder(worker, "a")
    third = granted(worker, "c")
    assert unit_of(third) == unit_of(second), "the first one computed serves hits"
    worker.free("a")
    assert states(worker)[:3] == ["FREE"] * 3


def test_a_unit_of_ones_own_becomes_the_roots_if_the_first_was_evicted() -> None:
    worker = desk(num_unit_blocks=7)
    granted(worker, "a")
    second = granted(worker, "b", no_wait=True)
    run_encoder(worker, "a")
    run_encoder(worker, "b")
    worker.free("a")
    granted(worker, "c", OTHER, count=12)
    worker.free("b")
    worker.free("c")
    again = granted(worker, "d")
    assert (unit_of(again), again.encoder_cached) == (unit_of(second), True)


def test_the_leader_of_a_unit_is_one_that_still_lives() -> None:
    worker = desk()
    granted(worker, "a")
    granted(worker, "b", no_wait=True)
    assert asks(worker, "c") == Wait(key("a"), 0)
    worker.free("a")
    assert asks(worker, "c") == Wait(key("b"), 0)
    worker.free("b")
    assert isinstance(asks(worker, "c"), Granted)


def test_a_larger_attempt_of_the_leader_does_not_wait_for_it() -> None:
    worker = desk()
    granted(worker, "a")
    item = worker.item(key("a", attempt=2), [1], root=INPUT, num_encoder_tokens=10)
    assert isinstance(worker.allocate_batch(item)[0], Granted)
    assert asks(worker, "b") == Wait(key("a", attempt=2), 0), "the fenced one makes no progress"


def test_a_sequence_that_wants_nothing_cached_gets_no_cached_unit() -> None:
    worker = desk()
    granted(worker, "a")
    run_encoder(worker, "a")
    assert not granted(worker, "b", max_cached_tokens=0, no_wait=True).encoder_cached
    assert granted(worker, "c", max_cached_tokens=3).encoder_cached


def test_an_allocate_that_is_repeated_gets_the_same_unit() -> None:
    worker = desk()
    first = granted(worker, "a")
    assert granted(worker, "a") == first
    run_encoder(worker, "a")
    assert granted(worker, "a").encoder_cached


def test_stating_again_that_the_encoder_has_run_changes_nothing() -> None:
    worker = desk()
    granted(worker, "a", tokens=range(9))
    for _ in range(2):
        run_encoder(worker, "a", 8)
    worker.report("a", 9)  # it need not be stated again
    assert states(worker)[:3] == ["HELD"] * 3


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"num_encoder_tokens": 0}, "num_encoder_tokens"),
        ({"num_encoder_tokens": 33}, "num_encoder_tokens"),
        ({"num_encoder_tokens": 10, "root": ROOT}, "root.input_digest"),
    ],
)
def test_a_sequence_needs_an_input_that_the_worker_takes(wanted: dict[str, object], field: str) -> None:
    worker = desk()
    item = worker.item("a", [1], **{"root": INPUT, **wanted})  # type: ignore[arg-type]
    assert worker.allocate_batch(item) == [Refused(Reason.BAD_FIELD)]
    outcomes, _ = worker.manager.allocate(worker.uplink(), [item])
    assert outcomes[0].field == field  # type: ignore[union-attr]


def test_an_input_that_never_fits_is_refused_with_the_figures() -> None:
    worker = desk(num_unit_blocks=5)
    item = worker.item("a", [1], root=INPUT, num_encoder_tokens=17)
    assert worker.allocate_batch(item) == [Refused(Reason.NEVER_FITS)]
    outcomes, _ = worker.manager.allocate(worker.uplink(), [item])
    assert "17 tokens of an encoder's input need 5 blocks of 4 of group 1" in outcomes[0].message  # type: ignore[union-attr]
    assert "has 4: shorten the input" in outcomes[0].message  # type: ignore[union-attr]


def test_equal_digests_are_of_inputs_of_one_length() -> None:
    worker = desk()
    granted(worker, "a", count=10)
    assert asks(worker, "a", count=13) == Refused(Reason.BAD_FIELD), "another one of the sequence itself"
    run_encoder(worker, "a")
    assert asks(worker, "b", count=8) == Refused(Reason.BAD_FIELD)
    assert isinstance(asks(worker, "c", count=12), Granted), "in as many blocks"


def test_a_worker_without_cross_attention_takes_no_input_of_an_encoder() -> None:
    plain = Desk()
    assert asks(plain, "a", count=3) == Refused(Reason.BAD_FIELD)
    plain.grant("a", [1])
    assert plain.tell(encoded("a")) == Refused(Reason.BAD_FIELD)


def test_nothing_is_computed_without_the_encoder() -> None:
    worker = desk()
    granted(worker, "a", tokens=range(9))
    assert worker.report("a", 9) == Refused(Reason.BAD_FIELD)
    assert isinstance(worker.tell(encoded("a", 9)), Appended)


def test_what_was_cached_is_computed_without_the_encoder() -> None:
    worker = desk()
    granted(worker, "a", tokens=range(9))
    worker.leave(encoded("a", 9))
    granted(worker, "b", OTHER, count=32)
    worker.free("b")
    granted(worker, "c", tokens=range(9))
    assert isinstance(worker.report("c", 8), Appended)
    assert worker.report("c", 9) == Refused(Reason.BAD_FIELD)


def test_a_unit_never_grows() -> None:
    worker = desk()
    unit = unit_of(granted(worker, "a"))
    (spare,) = worker.refill(1, group=CROSS)
    more = SequenceUpdate(key("a"), bound=((), (TableEntry(len(unit), *spare),)))
    assert worker.tell(more) == Refused(Reason.BAD_FIELD)
    pool = worker.session.pools[CROSS]
    same = SequenceUpdate(key("a"), bound=((), tuple(TableEntry(i, b, pool.generation(b)) for i, b in enumerate(unit))))
    assert isinstance(worker.tell(same), Appended)


def test_an_engine_without_a_reserve_gets_longer_tables_and_no_more_of_a_unit() -> None:
    worker = desk()
    granted(worker, "a")
    run_encoder(worker, "a")
    appended = worker.report("a", want_blocks=3)
    assert isinstance(appended, Appended)
    assert [entry.table_index for entry in appended.new_entries[0]] == [1, 2]
    assert len(appended.new_entries) == 1 or not appended.new_entries[CROSS]


def test_blocks_of_the_reserve_evict_units_as_a_whole() -> None:
    worker = desk()
    granted(worker, "a", count=16)
    worker.leave(encoded("a"))
    granted(worker, "b", OTHER, count=16)
    worker.leave(encoded("b"))
    worker.refill(1, group=CROSS)
    assert states(worker) == ["RESERVED", *["FREE"] * 3, *["CACHED"] * 4]


def test_a_sequence_with_windows_has_a_unit_too() -> None:
    """Full attention, a window and cross attention: the tables do not get in each other's way."""
    worker = Desk((33, 17, 9), SIZE, windows=((0, 0), (8, 4)), max_encoder_tokens=32)
    first = granted(worker, "a", tokens=range(12))
    assert [len(table.blocks) for table in first.tables] == [3, 0, 3]
    run_encoder(worker, "a")
    worker.name("a", 2)
    second = granted(worker, "b", tokens=range(12))
    assert (second.num_cached_tokens, second.encoder_cached, second.tables[2].blocks) == (
        8,
        True,
        first.tables[2].blocks,
    )
    assert len(second.tables[1].blocks) == 2


def test_only_windows_and_a_unit_do_too() -> None:
    worker = Desk((17, 9), SIZE, windows=((8, 4),), max_encoder_tokens=32)
    granted(worker, "a", tokens=range(12))
    run_encoder(worker, "a")
    worker.name("a", 2)
    second = granted(worker, "b", tokens=range(12))
    assert (second.num_cached_tokens, second.encoder_cached) == (8, True)


def test_what_ended_with_its_session_is_swept() -> None:
    worker = desk()
    granted(worker, "a", tokens=range(9))
    worker.leave(encoded("a", 9))
    granted(worker, "b", OTHER)
    worker.lockstep.deregister(worker.number)
    while worker.lockstep.sweep():
        pass
    assert worker.manager._tree.roots() == []
    gc.collect()


# -- Route and Explain


def test_route_prefers_the_worker_that_has_the_unit() -> None:
    """Fresh prompts of the decoder are one token long: without the unit all workers would be equal."""
    both = Lockstep()
    first = desk(worker_id="w1", lockstep=both)
    second = desk(worker_id="w2", lockstep=both)
    for worker, root in ((first, INPUT), (second, OTHER)):
        granted(worker, "a" + worker.worker_id, root, count=32)
        worker.leave(encoded("a" + worker.worker_id))
    for root, expected in ((INPUT, "w1"), (OTHER, "w2")):
        ranked = both.manager.route(root, token_bytes([1]), num_encoder_tokens=32)
        assert ranked[0].session.worker_id == expected
        assert [worker.encoder_cached for worker in ranked] == [True, False]
        both.route(root, token_bytes([1]))


def test_route_prefers_the_worker_that_is_about_to_run_the_encoder() -> None:
    both = Lockstep()
    workers = [desk(worker_id=name, lockstep=both) for name in ("w1", "w2", "w3")]
    granted(workers[1], "a", count=32)
    ranked = both.manager.route(INPUT, token_bytes([1]), num_encoder_tokens=32)
    assert (ranked[0].session.worker_id, ranked[0].encoder_cached) == ("w2", False)


def test_equal_cold_inputs_meet_on_one_worker_and_different_ones_spread() -> None:
    both = Lockstep()
    for name in ("w1", "w2", "w3"):
        desk(worker_id=name, lockstep=both)
    chosen = [
        both.manager.route(root_of(f"text {i}"), token_bytes([1]), num_encoder_tokens=8)[0].session.worker_id
        for i in range(40)
    ]
    assert set(chosen) == {"w1", "w2", "w3"}
    again = [
        both.manager.route(root_of(f"text {i}"), token_bytes([1]), num_encoder_tokens=8)[0].session.worker_id
        for i in range(40)
    ]
    assert again == chosen


def test_explain_says_whether_the_unit_is_there() -> None:
    worker = desk()
    granted(worker, "a", tokens=range(9))
    worker.leave(encoded("a", 9))
    for root, expected in ((INPUT, True), (OTHER, False)):
        (explained,) = worker.manager.explain(root, token_bytes(range(9))).workers
        assert explained.encoder_cached == expected


# -- what a worker registers


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ([UnitSpec(9, max_encoder_tokens=8)], "needed another group"),
        ([DenseSpec(9), UnitSpec(9, max_encoder_tokens=8), UnitSpec(9, max_encoder_tokens=8)], "at most one group"),
        ([DenseSpec(9), UnitSpec(9, max_encoder_tokens=(1 << 20) + 1)], "needed 1 to 1048576"),
    ],
)
def test_a_layout_has_one_group_with_cross_attention_next_to_others(groups: list[GroupSpec], field: str) -> None:
    introduction = registration()._replace(layout=Layout(SIZE, tuple(groups)))
    refusal = refused(Lockstep().manager.register, introduction, 0.0)
    assert (refusal.reason, field in refusal.message) == (Reason.BAD_FIELD, True)


def test_the_manager_knows_the_pool_of_units_by_its_kind() -> None:
    worker = desk()
    assert isinstance(worker.session.pools[CROSS], UnitPool)
    assert not isinstance(worker.session.pools[0], UnitPool)


# -- displays


def test_describe_shows_the_blocks_of_a_unit_with_their_places_and_owners() -> None:
    worker = desk()
    granted(worker, "a", count=10)
    before = worker.manager.describe_blocks("w1", group=CROSS)
    assert [(one.table_index, one.token_count, one.sealed) for one in before[:3]] == [
        (0, 0, False),
        (1, 0, False),
        (2, 0, False),
    ]
    run_encoder(worker, "a")
    granted(worker, "b")
    shown = worker.manager.describe_blocks("w1", group=CROSS)
    assert [(one.table_index, one.token_count, one.sealed) for one in shown[:3]] == [
        (0, SIZE, True),
        (1, SIZE, True),
        (2, SIZE, True),
    ]
    assert shown[1].owners == (key("a"), key("b"))
    assert shown[3].state is State.FREE


def test_one_block_of_a_unit_is_shown_with_the_others_of_it() -> None:
    worker = desk()
    granted(worker, "a", count=10)
    filling = describe_block(worker.session, 2, CROSS)
    assert (filling.root, filling.prefix_blocks, filling.block.owners) == (INPUT, (1, 2), (key("a"),))
    run_encoder(worker, "a")
    sealed = describe_block(worker.session, 2, CROSS)
    assert (sealed.root, sealed.tokens, sealed.prefix_blocks) == (INPUT, b"", (1, 2))
    assert (sealed.block.table_index, sealed.block.owners, sealed.owner_blocks) == (1, (key("a"),), (3,))


def test_the_counters_of_a_worker_count_the_encoders_input_as_part_of_the_prompt() -> None:
    worker = desk()
    granted(worker, "a", count=10, tokens=range(9))
    run_encoder(worker, "a", 9)
    granted(worker, "b", count=10, tokens=range(9))
    assert (worker.session.num_prompt_tokens, worker.session.num_cached_tokens) == (38, 18)


def test_an_append_that_is_refused_seals_no_unit() -> None:
    worker = desk()
    granted(worker, "a")
    wrong = encoded("a")._replace(start=5)
    result = worker.lockstep.append(worker.uplink(), AppendItem(wrong))
    assert not isinstance(result, Refused)
    assert result[0] == [Refused(Reason.GAP, 1)]
    assert asks(worker, "b") == Wait(key("a"), 0)


def test_a_released_scratch_of_a_unit_is_refused() -> None:
    worker = desk()
    granted(worker, "a")
    pool = worker.session.pools[CROSS]
    wrong = SequenceUpdate(key("a"), scratch=((), (ReservedBlock(1, pool.generation(1)),)))
    assert worker.tell(wrong) == Refused(Reason.BAD_FIELD)


def test_an_item_says_nothing_of_an_encoder_by_default() -> None:
    assert AllocateItem(key("a"), ROOT, b"").num_encoder_tokens == 0


# -- forks


def fork(at: Desk, parent: str, child: str) -> Appended | Refused:
    """A fork that has computed nothing of its own."""
    (outcome,) = at.fork(at.fork_item(parent, child, 0))
    return outcome


def ref_counts(at: Desk, blocks: tuple[int, ...]) -> list[int]:
    """Of blocks of the group with cross attention."""
    return [at.session.pools[CROSS].ref_count(block) for block in blocks]


def test_a_fork_has_the_whole_unit_of_its_parent_however_much_it_shares() -> None:
    worker = desk()
    unit = unit_of(granted(worker, "a"))
    run_encoder(worker, "a")
    assert isinstance(fork(worker, "a", "b"), Appended)
    assert ref_counts(worker, unit) == [2] * 3
    worker.free("a")
    assert ref_counts(worker, unit) == [1] * 3
    worker.free("b")
    assert states(worker)[:3] == ["CACHED"] * 3


def test_forks_share_a_unit_that_is_their_parents_own_until_the_last_of_them_ends() -> None:
    worker = desk()
    granted(worker, "a")
    own = unit_of(granted(worker, "b", no_wait=True))
    run_encoder(worker, "a")
    run_encoder(worker, "b")
    assert isinstance(fork(worker, "b", "c"), Appended)
    assert isinstance(fork(worker, "c", "d"), Appended)
    for name, count in (("b", 2), ("d", 1), ("c", 0)):
        worker.free(name)
        assert ref_counts(worker, own) == [count] * 3
    assert states(worker)[3:6] == ["FREE"] * 3


def test_a_unit_of_a_parents_own_becomes_the_roots_while_a_fork_has_it() -> None:
    worker = desk(num_unit_blocks=7)
    granted(worker, "a")
    own = unit_of(granted(worker, "b", no_wait=True))
    run_encoder(worker, "a")
    run_encoder(worker, "b")
    assert isinstance(fork(worker, "b", "c"), Appended)
    worker.free("a")
    granted(worker, "d", OTHER, count=12)
    worker.free("b")
    again = granted(worker, "e")
    assert (unit_of(again), again.encoder_cached, ref_counts(worker, own)) == (own, True, [2] * 3)


def test_nothing_is_forked_before_the_encoder_has_run() -> None:
    worker = desk()
    granted(worker, "a")
    outcome = fork(worker, "a", "b")
    assert isinstance(outcome, Refused)
    assert outcome.reason is Reason.GAP
    assert outcome.position == 0

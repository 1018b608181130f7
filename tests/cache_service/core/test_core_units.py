"""Units: the KV of an encoder's input is shared between equal inputs, and is whole or not at all.

Drawn histories (test_core_state_machine.py) have them too, and a model says what is right. Here is an example of the main rules,
what a refusal says, what histories seldom reach, and what a worker reports of units.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from kvpool.cache_service.core import block_mirror
from kvpool.cache_service.core.block_mirror import BlockMirror
from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.description import describe_block
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.groups.unit import UnitSpec
from kvpool.cache_service.core.messages import (
    Appended,
    Granted,
    GroupSpec,
    Layout,
    ReportedSequence,
    ReportedUnit,
    Root,
    SequenceUpdate,
    TableEntry,
    Wait,
)
from kvpool.cache_service.core.prefix_tree import RootNode
from kvpool.cache_service.core.refusal import Reason
from kvpool.cache_service.core.restored import Case
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.kinds import unit_pool
from tests.cache_service.core.lockstep import FINGERPRINT, Lockstep, key, refused, registration, token_bytes
from tests.cache_service.core.model import Refused
from tests.cache_service.core.reporter import OLD, Reporter, chain, entries, reserved

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


def cache(at: Desk, name: str, root: Root = INPUT, count: int = 10, *, num_tokens: int = 1) -> None:
    """A whole request, whose unit stays as cache."""
    granted(at, name, root, count, tokens=range(num_tokens))
    at.leave(encoded(name, num_tokens))


def states(at: Desk) -> list[str]:
    """Of the blocks of the group with cross attention, from block 1 on."""
    pool = at.session.pools[CROSS]
    return [pool.state(block).name for block in range(1, pool.num_blocks)]


def test_sequences_with_an_input_share_its_unit_once_the_encoder_has_run_and_after_their_end() -> None:
    worker = desk()
    first = granted(worker, "a")
    assert (len(unit_of(first)), first.encoder_cached) == (3, False)
    assert asks(worker, "b", tokens=(2,)) == Wait(key("a"), 0)
    assert worker.session.counts()[CROSS].held == 3, "who waits holds nothing"
    worker.encode("a")
    second = granted(worker, "b", tokens=(2,))
    assert (unit_of(second), second.encoder_cached) == (unit_of(first), True)
    assert worker.session.counts()[CROSS].shared == 3
    worker.free("a")
    worker.free("b")
    assert states(worker)[:3] == ["CACHED"] * 3
    again = granted(worker, "c")
    assert (unit_of(again), again.encoder_cached) == (unit_of(first), True)


def test_a_cached_unit_keeps_its_root_and_nothing_else_does() -> None:
    worker = desk()
    cache(worker, "a")
    (root,) = worker.manager._tree.roots()
    assert isinstance(root, RootNode)
    assert root.key == (INPUT, SIZE)
    granted(worker, "b", OTHER, count=32)
    assert [one.key for one in worker.manager._tree.roots()] == [(OTHER, SIZE)]


def test_evicting_one_block_of_a_unit_evicts_all_of_it() -> None:
    """The pool has 8 blocks: a unit of 3, another of 4, and then one of 2 is wanted."""
    worker = desk()
    cache(worker, "a", count=12)
    cache(worker, "b", OTHER, count=16)
    third = granted(worker, "c", root_of("a third"), count=5)
    assert unit_of(third) == (1, 2), "one block was free, so the oldest unit has gone"
    assert states(worker) == ["HELD", "HELD", "FREE", "CACHED", "CACHED", "CACHED", "CACHED", "FREE"]
    assert worker.session.pools[CROSS].num_evicted == 3
    worker.free("c")
    assert not granted(worker, "a", count=12).encoder_cached
    assert granted(worker, "b", OTHER, count=16).encoder_cached


def test_pictures_show_what_is_left_of_an_evicted_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_mirror, "SLICE_BLOCKS", 2)
    worker = desk()
    cache(worker, "a", count=16)
    cache(worker, "b", OTHER, count=16)
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


def test_a_decoders_prefix_hits_although_its_unit_is_evicted_and_nothing_more_is_computed_without_the_encoder() -> None:
    """The encoder runs again, and the decoder computes only what is not cached."""
    worker = desk()
    cache(worker, "a", num_tokens=9)
    cache(worker, "b", OTHER, count=32)
    again = granted(worker, "c", tokens=range(9))
    assert (again.num_cached_tokens, again.encoder_cached) == (8, False)
    assert isinstance(worker.report("c", 8), Appended), "that was cached"
    assert worker.report("c", 9) == Refused(Reason.BAD_FIELD)
    assert isinstance(worker.tell(encoded("c", 9)), Appended)


def test_a_sequence_does_not_wait_for_the_encoder_of_another_worker() -> None:
    """The root is common to all workers, what is computed under it is not."""
    lockstep = Lockstep()
    workers = [desk(worker_id=name, lockstep=lockstep) for name in ("one", "two")]
    granted(workers[0], "a")
    assert not granted(workers[1], "b").encoder_cached


def test_a_unit_of_ones_own_becomes_the_roots_if_the_first_was_evicted() -> None:
    worker = desk(num_unit_blocks=7)
    granted(worker, "a")
    second = granted(worker, "b", no_wait=True)
    worker.encode("a")
    worker.encode("b")
    worker.free("a")
    granted(worker, "c", OTHER, count=12)
    worker.free("b")
    worker.free("c")
    again = granted(worker, "d")
    assert (unit_of(again), again.encoder_cached) == (unit_of(second), True)


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
    worker.encode("a")
    assert asks(worker, "b", count=8) == Refused(Reason.BAD_FIELD)
    assert isinstance(asks(worker, "c", count=12), Granted), "in as many blocks"


def test_a_worker_without_cross_attention_takes_no_input_of_an_encoder() -> None:
    plain = Desk()
    assert asks(plain, "a", count=3) == Refused(Reason.BAD_FIELD)
    plain.grant("a", [1])
    assert plain.tell(encoded("a")) == Refused(Reason.BAD_FIELD)


def test_a_unit_never_grows() -> None:
    worker = desk()
    unit = unit_of(granted(worker, "a"))
    (spare,) = worker.refill(1, group=CROSS)
    more = SequenceUpdate(key("a"), bound=((), (TableEntry(len(unit), *spare),)))
    assert worker.tell(more) == Refused(Reason.BAD_FIELD)
    pool = worker.session.pools[CROSS]
    same = SequenceUpdate(key("a"), bound=((), tuple(TableEntry(i, b, pool.generation(b)) for i, b in enumerate(unit))))
    assert isinstance(worker.tell(same), Appended)


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


# -- displays


def test_describe_shows_the_blocks_of_a_unit_with_their_places_and_owners() -> None:
    worker = desk()
    granted(worker, "a", count=10)
    before = worker.manager.describe_blocks("w1", group=CROSS)
    assert [(one.table_index, one.token_count, one.sealed) for one in before[:3]] == [(i, 0, False) for i in range(3)]
    worker.encode("a")
    granted(worker, "b")
    shown = worker.manager.describe_blocks("w1", group=CROSS)
    assert [(one.table_index, one.token_count, one.sealed) for one in shown[:3]] == [(i, SIZE, True) for i in range(3)]
    assert shown[1].owners == (key("a"), key("b"))
    assert shown[3].state is State.FREE


def test_one_block_of_a_unit_is_shown_with_the_others_of_it() -> None:
    worker = desk()
    granted(worker, "a", count=10)
    filling = describe_block(worker.session, 2, CROSS)
    assert (filling.root, filling.prefix_blocks, filling.block.owners) == (INPUT, (1, 2), (key("a"),))
    worker.encode("a")
    sealed = describe_block(worker.session, 2, CROSS)
    assert (sealed.root, sealed.tokens, sealed.prefix_blocks) == (INPUT, b"", (1, 2))
    assert (sealed.block.table_index, sealed.block.owners, sealed.owner_blocks) == (1, (key("a"),), (3,))


def test_the_counters_of_a_worker_count_the_encoders_input_as_part_of_the_prompt() -> None:
    worker = desk()
    granted(worker, "a", count=10, tokens=range(9))
    worker.encode("a", 9)
    granted(worker, "b", count=10, tokens=range(9))
    assert (worker.session.num_prompt_tokens, worker.session.num_cached_tokens) == (38, 18)


def test_nothing_is_forked_before_the_encoder_has_run() -> None:
    worker = desk()
    granted(worker, "a")
    assert worker.fork(worker.fork_item("a", "b", 0)) == [Refused(Reason.GAP, 0)]


INPUT, OTHER = root_of("an input"), root_of("another one")


def reporter() -> Reporter:
    """A worker with an encoder for inputs of up to 8 blocks."""
    return Reporter(num_blocks=(17, 17), max_encoder_tokens=32)


def is_cached(worker: Reporter, name: str, num_tokens: int = 10) -> bool:
    """Whether a new sequence with the input gets its unit as a hit."""
    return worker.allocate(name, [1], INPUT, num_encoder_tokens=num_tokens).encoder_cached


def unit(*blocks: int, root: Root = INPUT, group: int = CROSS, generation: int = OLD) -> ReportedUnit:
    """A complete one."""
    return ReportedUnit(root, group, tuple(one._replace(generation=generation) for one in reserved(*blocks)))


def sequence(
    name: str, *blocks: int, root: Root = INPUT, computed: int = 0, cached: int = 0, encoded: bool = True
) -> ReportedSequence:
    """One of six tokens, in blocks 1 and 2 of the decoder's group or, by its name, in others."""
    first = 1 + 2 * (ord(name) - ord("a"))
    tables = entries(first, first + 1), entries(*blocks)
    return ReportedSequence(key(name), root, token_bytes(range(6)), computed, cached, tables, encoder_computed=encoded)


def test_a_unit_that_nobody_has_is_a_hit_after_the_report() -> None:
    worker = reporter()
    worker.report(units=(unit(3, 1, 2),))
    assert worker.states(1, 2, 3, group=CROSS) == [State.CACHED] * 3
    grant = worker.allocate("a", [1], INPUT, num_encoder_tokens=10)
    assert grant.encoder_cached
    assert grant.tables[CROSS][:2] == ((3, 1, 2), (OLD,) * 3)
    assert worker.manager.reconciled[Case.CACHED] == 3


def test_the_order_of_eviction_is_that_of_the_worker() -> None:
    worker = reporter()
    units = [unit(1, 2, root=root_of("a")), unit(3, 4, root=root_of("b")), unit(5, 6, root=root_of("c"))]
    worker.report(units=tuple(units), idle_blocks=((), (5, 6, 1, 2, 3, 4)))
    pool = unit_pool(worker.session)
    assert pool is not None
    assert [root.key[0] for root in pool.cached_units()] == [root_of("c"), root_of("a"), root_of("b")]
    assert list(pool.free_list())[-6:] == [5, 6, 1, 2, 3, 4]


def test_units_of_live_sequences_are_held_and_shared() -> None:
    worker = reporter()
    worker.report(units=(unit(1, 2),), sequences=(sequence("a", 1, 2, computed=6), sequence("b", 1, 2)))
    assert worker.session.counts()[CROSS].shared == 2
    cases = worker.manager.reconciled
    assert (cases[Case.HELD_SEALED], cases[Case.SHARED]) == (2 + 1, 2), "and a block of the decoder"
    assert worker.session.sequences["b", 1].encoder_computed


def test_an_encoder_that_has_not_run_leads_the_root_as_before() -> None:
    worker = reporter()
    worker.report(sequences=(sequence("a", 4, 5, 6, encoded=False),))
    assert worker.ask("b", [1], INPUT, no_wait=False, num_encoder_tokens=10) == Wait(key("a"), 0)
    worker.append(SequenceUpdate(key("a"), num_computed_tokens=6, encoder_computed=True))
    assert is_cached(worker, "b", 12)


def test_a_complete_unit_that_only_a_table_names_is_a_hit_too() -> None:
    """As with complete blocks of tables: the sequence says what they hold."""
    worker = reporter()
    worker.report(sequences=(sequence("a", 4, 5, 6),))
    assert is_cached(worker, "b")


def test_a_second_unit_of_an_input_is_free_or_its_sequences_own() -> None:
    worker = reporter()
    worker.report(units=(unit(1, 2), unit(3, 4), unit(5, 6)), sequences=(sequence("a", 3, 4), sequence("b", 1, 2)))
    assert worker.states(1, 3, 5, group=CROSS) == [State.HELD, State.HELD, State.FREE]
    assert worker.manager.reconciled[Case.DUPLICATE] == 4
    worker.free("a")
    assert worker.states(3, 4, group=CROSS) == [State.FREE] * 2


def test_a_report_in_parts_is_one_report() -> None:
    worker = reporter()
    worker.report(0, last=False, units=(unit(1, 2),))
    worker.report(1, last=False, units=(unit(3, 4, root=OTHER),))
    worker.report(2, sequences=(sequence("a", 1, 2), sequence("b", 3, 4, root=OTHER)))
    assert worker.states(1, 2, 3, 4, group=CROSS) == [State.HELD] * 4


def test_forks_share_a_unit_that_serves_no_hits() -> None:
    """Their parent has computed it although there was one."""
    worker = reporter()
    worker.report(units=(unit(1, 2), unit(3, 4)), sequences=(sequence("a", 3, 4), sequence("b", 3, 4)))
    assert worker.states(1, 2, 3, 4, group=CROSS) == [State.CACHED, State.CACHED, State.HELD, State.HELD]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"units": (unit(1, 2, group=0),)}, "group 0 has no cross attention"),
        ({"units": (unit(),)}, "a unit has 1 to 8 blocks, got 0"),
        ({"units": (unit(*range(1, 10)),)}, "a unit has 1 to 8 blocks, got 9"),
        ({"units": (unit(1, 1),)}, "reported twice"),
        ({"units": (unit(1, 2), unit(2, 3, root=OTHER))}, "reported twice"),
        ({"units": (unit(1, 99),)}, "block 99 does not exist"),
        ({"units": (unit(1, 2, generation=1 << 60),)}, "no manager up to this one has given"),
        ({"units": (unit(1, 2, root=Root(FINGERPRINT)),)}, "needs the SHA-256"),
        ({"units": (unit(1, 2, root=Root("another", input_digest=bytes(32))),)}, "the model fingerprint"),
        ({"units": (unit(1, 2, group=7),)}, "registered with 2 groups, got group 7"),
        ({"sequences": (sequence("a"),)}, "needed 1 to 8 blocks for the encoder's input, got 0"),
        ({"sequences": (sequence("a", 4, 4),)}, "twice in its unit"),
        ({"sequences": (sequence("a", 4, 5, computed=3, encoded=False),)}, "without the encoder's output"),
        ({"units": (unit(1, 2),), "sequences": (sequence("a", 1),)}, "not one that the report states"),
        ({"units": (unit(1, 2),), "sequences": (sequence("a", 2, 1),)}, "not one that the report states"),
        ({"units": (unit(1, 2),), "sequences": (sequence("a", 1, 3),)}, "not one that the report states"),
        ({"units": (unit(1, 2),), "sequences": (sequence("a", 3, 1),)}, "not one that the report states"),
        ({"units": (unit(1, 2),), "sequences": (sequence("a", 1, 2, root=OTHER),)}, "not one that the report states"),
        (
            {"units": (unit(1, 2),), "sequences": (sequence("a", 1, 2, encoded=False),)},
            "not one that the report states",
        ),
        ({"sequences": (sequence("a", 4, 5), sequence("b", 4, 5, encoded=False))}, "reported twice"),
        ({"units": (unit(1, 2),), "reserve": ((), reserved(1))}, "reported twice"),
        ({"contents": (chain((0,), (1,), root=INPUT),)}, "they come as units"),
    ],
)
def test_a_report_of_units_that_cannot_be_ends_the_session(content: dict[str, Any], why: str) -> None:
    worker = reporter()
    assert why in worker.bad_report(**content)
    assert worker.manager._tree.roots() == []


def test_a_content_that_no_block_of_the_encoders_group_holds_is_taken() -> None:
    """Workers state a block of each group, 0 where there is none."""
    worker = reporter()
    worker.report(contents=(chain((1,), (0,), root=INPUT),))
    assert worker.states(1) == [State.CACHED]


@pytest.mark.parametrize(
    "content",
    [{"units": (unit(1, group=0),)}, {"sequences": (sequence("a")._replace(tables=(entries(1, 2),)),)}],
    ids=str,
)
def test_a_worker_without_an_encoder_reports_no_units(content: dict[str, Any]) -> None:
    Reporter().bad_report(**content)

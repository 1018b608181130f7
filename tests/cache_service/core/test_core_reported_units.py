"""Units in reports: what a worker says of the KV of encoder inputs is taken as it is said, or ends the session."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.messages import ReportedSequence, ReportedUnit, Root, SequenceUpdate, Wait
from kvpool.cache_service.core.restored import Case
from tests.cache_service.core.kinds import unit_pool
from tests.cache_service.core.lockstep import FINGERPRINT, key, token_bytes
from tests.cache_service.core.reporter import OLD, Reporter, chain, entries, reserved

CROSS = 1
"""The group with cross attention."""


def root_of(text: str) -> Root:
    """The root of sequences with this input of the encoder."""
    return Root(FINGERPRINT, input_digest=sha256(text.encode()).digest())


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

"""Units in reports: what a worker says of the KV of encoder inputs is taken as it is said, or ends the session."""

from __future__ import annotations

from hashlib import sha256

import pytest

from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    ContentRun,
    Granted,
    ReportedBlocks,
    ReportedSequence,
    ReportedUnit,
    ReportPart,
    ReservedBlock,
    Root,
    SequenceUpdate,
    TableEntry,
    Uplink,
    Wait,
)
from kvpool.cache_service.core.refusal import Reason
from kvpool.cache_service.core.restored import Case
from tests.cache_service.core.kinds import unit_pool
from tests.cache_service.core.lockstep import FINGERPRINT, key, refused, registration, token_bytes
from tests.cache_service.core.reporter import BaseReporter

SIZE, CROSS, OLD = 4, 1, 5


def root_of(text: str) -> Root:
    """The root of sequences with this input of the encoder."""
    return Root(FINGERPRINT, input_digest=sha256(text.encode()).digest())


INPUT, OTHER = root_of("an input"), root_of("another one")


class Reporter(BaseReporter):
    """A worker with an encoder that registers with state, and reports what a test says."""

    def __init__(self, max_encoder_tokens: int = 32) -> None:
        pools = registration(num_blocks=(17, 17), block_size=SIZE, max_encoder_tokens=max_encoder_tokens)
        super().__init__(CacheManager(3), pools)

    def allocate(self, name: str, root: Root = INPUT, count: int = 10, *, no_wait: bool = True) -> Granted | Wait:
        item = AllocateItem(key(name), root, token_bytes([1]), no_wait=no_wait, num_encoder_tokens=count)
        (outcome,), _ = self.manager.allocate(self.uplink(), [item])
        assert isinstance(outcome, Granted | Wait), outcome
        return outcome

    def states(self, *blocks: int) -> list[State]:
        return [self.session.pools[CROSS].state(block) for block in blocks]


def unit(*blocks: int, root: Root = INPUT, group: int = CROSS, generation: int = OLD) -> ReportedUnit:
    """A complete one."""
    return ReportedUnit(root, group, tuple(ReservedBlock(block, generation) for block in blocks))


def sequence(
    name: str, *blocks: int, root: Root = INPUT, computed: int = 0, cached: int = 0, encoded: bool = True
) -> ReportedSequence:
    """One of six tokens, in blocks 1 and 2 of the decoder's group or, by its name, in others."""
    first = 1 + 2 * (ord(name) - ord("a"))
    table = tuple(TableEntry(index, first + index, OLD) for index in range(2))
    own = tuple(TableEntry(index, block, OLD) for index, block in enumerate(blocks))
    return ReportedSequence(
        key(name), root, token_bytes(range(6)), computed, cached, (table, own), encoder_computed=encoded
    )


CONTENT = ContentRun(0, INPUT, token_bytes(range(SIZE)), 1, (ReportedBlocks(CROSS, (1,), (OLD,)),))
"""The tokens of a text in a block of the encoder's group."""


def test_a_unit_that_nobody_has_is_a_hit_after_the_report() -> None:
    worker = Reporter()
    worker.report(units=(unit(3, 1, 2),))
    assert worker.states(1, 2, 3) == [State.CACHED] * 3
    grant = worker.allocate("a")
    assert isinstance(grant, Granted)
    assert (grant.tables[CROSS].blocks, grant.tables[CROSS].generations, grant.encoder_cached) == (
        (3, 1, 2),
        (OLD,) * 3,
        True,
    )
    assert worker.manager.reconciled[Case.CACHED] == 3


def test_the_order_of_eviction_is_that_of_the_worker() -> None:
    worker = Reporter()
    units = [unit(1, 2, root=root_of("a")), unit(3, 4, root=root_of("b")), unit(5, 6, root=root_of("c"))]
    worker.report(units=tuple(units), idle_blocks=((), (5, 6, 1, 2, 3, 4)))
    pool = unit_pool(worker.session)
    assert pool is not None
    assert [root.key[0] for root in pool.cached_units()] == [root_of("c"), root_of("a"), root_of("b")]
    assert list(pool.free_list())[-6:] == [5, 6, 1, 2, 3, 4]


def test_units_of_live_sequences_are_held_and_shared() -> None:
    worker = Reporter()
    worker.report(units=(unit(1, 2),), sequences=(sequence("a", 1, 2, computed=6), sequence("b", 1, 2)))
    assert worker.session.counts()[CROSS].shared == 2
    cases = worker.manager.reconciled
    assert (cases[Case.HELD_SEALED], cases[Case.SHARED]) == (2 + 1, 2), "and a block of the decoder"
    assert worker.session.sequences["b", 1].encoder_computed


def test_an_encoder_that_has_not_run_leads_the_root_as_before() -> None:
    worker = Reporter()
    worker.report(sequences=(sequence("a", 4, 5, 6, encoded=False),))
    assert worker.allocate("b", no_wait=False) == Wait(key("a"), 0)
    update = SequenceUpdate(key("a"), num_computed_tokens=6, encoder_computed=True)
    worker.manager.append(worker.uplink(), [AppendItem(update)])
    worker.check()
    assert worker.allocate("b", count=12).encoder_cached  # type: ignore[union-attr]


def test_a_complete_unit_that_only_a_table_names_is_a_hit_too() -> None:
    """As with complete blocks of tables: the sequence says what they hold."""
    worker = Reporter()
    worker.report(sequences=(sequence("a", 4, 5, 6),))
    assert worker.allocate("b").encoder_cached  # type: ignore[union-attr]


def test_a_second_unit_of_an_input_is_free_or_its_sequences_own() -> None:
    worker = Reporter()
    worker.report(
        units=(unit(1, 2), unit(3, 4), unit(5, 6)),
        sequences=(sequence("a", 3, 4), sequence("b", 1, 2)),
    )
    assert worker.states(1, 3, 5) == [State.HELD, State.HELD, State.FREE]
    assert worker.manager.reconciled[Case.DUPLICATE] == 4
    worker.manager.free(worker.uplink(), [SequenceUpdate(key("a"))])
    worker.check()
    assert worker.states(3, 4) == [State.FREE] * 2


def test_a_report_in_parts_is_one_report() -> None:
    worker = Reporter()
    worker.report(0, last=False, units=(unit(1, 2),))
    worker.report(1, last=False, units=(unit(3, 4, root=OTHER),))
    worker.report(2, sequences=(sequence("a", 1, 2), sequence("b", 3, 4, root=OTHER)))
    assert worker.states(1, 2, 3, 4) == [State.HELD] * 4


def test_forks_share_a_unit_that_serves_no_hits() -> None:
    """Their parent has computed it although there was one."""
    worker = Reporter()
    worker.report(units=(unit(1, 2), unit(3, 4)), sequences=(sequence("a", 3, 4), sequence("b", 3, 4)))
    assert worker.states(1, 2, 3, 4) == [State.CACHED, State.CACHED, State.HELD, State.HELD]
    worker.check()


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
        ({"units": (unit(1, 2),), "reserve": ((), (ReservedBlock(1, OLD),))}, "reported twice"),
        ({"contents": (CONTENT,)}, "they come as units"),
    ],
)
def test_a_report_of_units_that_cannot_be_ends_the_session(content: dict[str, object], why: str) -> None:
    worker = Reporter()
    refusal = refused(worker.report, **content)
    assert (refusal.reason, why in refusal.message) == (Reason.BAD_REPORT, True), refusal.message
    worker.check()
    assert not worker.manager.sessions
    assert worker.manager._tree.roots() == []


def test_a_content_that_no_block_of_the_encoders_group_holds_is_taken() -> None:
    """Workers state a block of each group, 0 where there is none."""
    worker = Reporter()
    worker.report(
        contents=(CONTENT._replace(blocks=(ReportedBlocks(0, (1,), (OLD,)), ReportedBlocks(CROSS, (0,), (0,)))),)
    )
    assert worker.session.pools[0].state(1) is State.CACHED


def test_a_worker_without_an_encoder_reports_no_units() -> None:
    manager = CacheManager(3)
    introduction = registration(num_blocks=17, block_size=SIZE)._replace(holds_state=True)
    number = manager.register(introduction, 0.0).session
    part = ReportPart(0, True, units=(unit(1, group=0),))
    assert refused(manager.report, Uplink(number, 1), part).reason is Reason.BAD_REPORT
    number = manager.register(introduction._replace(register_no=2), 0.0).session
    encoded = sequence("a")._replace(tables=sequence("a").tables[:1])
    assert (
        refused(manager.report, Uplink(number, 1), ReportPart(0, True, sequences=(encoded,))).reason
        is Reason.BAD_REPORT
    )

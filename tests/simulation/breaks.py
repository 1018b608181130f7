"""Ways to break the shipped code, each of which the simulator must notice within a few seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.cache_service import worker_codec
from kvpool.cache_service.core import incarnations, updates
from kvpool.cache_service.core.block_pool import BlockPool
from kvpool.cache_service.core.manager import REPORT_FIRST_SECONDS, CacheManager
from kvpool.cache_service.core.messages import ReportPart, Root
from kvpool.cache_service.core.recovery import Recovery
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.report_turns import ReportTurns
from kvpool.cache_service.election.epoch import MAX_EPOCH
from kvpool.cache_service.foreign_epochs import ForeignEpochs
from kvpool.cache_service.servicer import CacheServicer
from kvpool.cache_service.watching.places import Places
from kvpool.client.gate import Gate
from kvpool.v1 import worker_pb2
from kvpool.worker_service.cache import next_call
from kvpool.worker_service.cache.ledger import BlockLedger
from kvpool.worker_service.engine.engine import Engine
from kvpool.worker_service.generate_many import RequestGroup

Break = Callable[[pytest.MonkeyPatch], None]


def free_while_a_step_runs(patch: pytest.MonkeyPatch) -> None:
    """A worker says that blocks are free while its running step still names them."""

    original = next_call._free

    def _free(state: Any, link: Any, targets: list[int]) -> Any:
        running = [sequence for sequence in state.ending if sequence.in_step]
        for sequence in running:
            sequence.in_step = False
        call = original(state, link, targets)
        for sequence in running:
            sequence.in_step = True
        return call

    patch.setattr(next_call, "_free", _free)


def sealed_before_computed(patch: pytest.MonkeyPatch) -> None:
    """A worker reports the whole prompt as computed when its first chunk is."""
    original = next_call.append_call

    def append_call(state: Any, link: Any, sequences: Any, wishes: Any) -> Any:
        call, block_size = original(state, link, sequences, wishes), state.settings.block_size
        request: Any = call.request
        for item, sequence in zip(request.items, sequences, strict=True):
            known = item.update.start + len(item.update.tokens) // 4
            room = min(known, sequence.num_entries * block_size)
            item.update.num_computed_tokens = max(item.update.num_computed_tokens, room // block_size * block_size)
        return call

    patch.setattr(next_call, "append_call", append_call)


def leak_on_abort(patch: pytest.MonkeyPatch) -> None:
    """The manager forgets to release what an unanswered sequence holds that is freed before it has computed anything."""
    original = updates.free

    def free(tree: Any, attempts: Any, session: Any, update: Any, limits: Any) -> None:
        if update.num_computed_tokens:
            original(tree, attempts, session, update, limits)

    patch.setattr(updates, "free", free)


def late_calls_executed(patch: pytest.MonkeyPatch) -> None:
    """The manager executes calls that were overtaken by later ones."""
    original = CacheManager._begin

    def _begin(core: CacheManager, uplink: Any, num_items: int, **options: Any) -> Any:
        session = core._sessions.get(uplink.session)
        if session is not None:
            session.last_call_no = 0
        return original(core, uplink, num_items, **options)

    patch.setattr(CacheManager, "_begin", _begin)


def tenants_share(patch: pytest.MonkeyPatch) -> None:
    """The tenant's salt is dropped on one code path."""
    original = worker_codec.decode_root

    def decode_root(message: Any) -> Root:
        return original(message)._replace(tenant_salt="")

    patch.setattr(worker_codec, "decode_root", decode_root)


def reserve_not_reported(patch: pytest.MonkeyPatch) -> None:
    """A manager that comes back takes a worker's reserve for free blocks."""
    original = Recovery.apply

    def apply(recovery: Recovery, tree: Any, attempts: Any, part: ReportPart, limits: Any) -> None:
        original(recovery, tree, attempts, part._replace(reserve=()), limits)

    patch.setattr(Recovery, "apply", apply)


def tables_not_reported(patch: pytest.MonkeyPatch) -> None:
    """A manager that comes back takes live blocks for empty space."""
    original = Recovery.apply

    def apply(recovery: Recovery, tree: Any, attempts: Any, part: ReportPart, limits: Any) -> None:
        original(recovery, tree, attempts, part._replace(sequences=()), limits)

    patch.setattr(Recovery, "apply", apply)


def epoch_not_raised(patch: pytest.MonkeyPatch) -> None:
    """A manager whose state file was lost goes on with an epoch that its workers have seen."""
    patch.setattr(CacheServicer, "_is_foreign", lambda self, seen, registration: False)


def newer_process_fences(patch: pytest.MonkeyPatch) -> None:
    """A newer process takes the place of one that lives, without a proof that it has ended."""
    patch.setattr(incarnations, "_replaces", lambda registration, known: True)


def messages_raise_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """Any epoch that a worker claims to have seen is outgrown."""
    patch.setattr(ForeignEpochs, "may_outgrow", lambda self, seen, now: seen < MAX_EPOCH)


def stale_content_kept(patch: pytest.MonkeyPatch) -> None:
    """A recycled block is still found under what it held before."""
    original = BlockPool._forget

    def _forget(pool: BlockPool, block: int) -> None:
        node = pool.node(block)
        assert node is not None
        if node.depth != 1:
            original(pool, block)

    patch.setattr(BlockPool, "_forget", _forget)


def hits_without_the_guard(patch: pytest.MonkeyPatch) -> None:
    """As `sealed_before_computed`, and the worker believes whatever it is told."""
    sealed_before_computed(patch)

    def accept_hits(ledger: BlockLedger, blocks: list[int], *about: Any) -> Any:
        return ledger.content(blocks[-1]) if blocks else None

    patch.setattr(BlockLedger, "accept_hits", accept_hits)
    patch.setattr(BlockLedger, "accept_window", lambda ledger, entries, last, *about: last)


def nobody_wakes_the_engine(patch: pytest.MonkeyPatch) -> None:
    """The engine is not told that the cache side has something new."""
    patch.setattr(Engine, "on_cache_changed", lambda engine: None)


def answers_crossed(patch: pytest.MonkeyPatch) -> None:
    """A worker sends the answers to two requests of a stream under each other's numbers."""
    original = RequestGroup._gather

    def _gather(group: RequestGroup) -> worker_pb2.GenerateManyResponse:
        message = original(group)
        numbers = [answer.number for answer in message.answers]
        for answer, number in zip(message.answers, reversed(numbers), strict=True):
            answer.number = number
        return message

    patch.setattr(RequestGroup, "_gather", _gather)


def gate_forgets_its_base(patch: pytest.MonkeyPatch) -> None:
    """The client takes tokens of a continuation for those of the beginning."""
    original = Gate.open

    def open_(gate: Gate, attempt: int) -> None:
        original(gate, attempt)
        gate._base = 0

    patch.setattr(Gate, "open", open_)


def caches_wait_for_all_that_register(patch: pytest.MonkeyPatch) -> None:
    """A cache waits for whoever registered a moment ago, however long it has waited."""

    def _must_wait(core: CacheManager, session: Any) -> bool:
        coming = [core._sessions[number] for number in core._recoveries]
        return not session.recovering and any(
            one.recovering and core._now - one.registered_at < REPORT_FIRST_SECONDS for one in coming
        )

    patch.setattr(CacheManager, "_must_wait", _must_wait)


def turns_without_end(patch: pytest.MonkeyPatch) -> None:
    """A report keeps its turn until it is complete."""
    patch.setattr(ReportTurns, "_end_turns", lambda turns, now: None)


def places_for_those_who_come_first(patch: pytest.MonkeyPatch) -> None:
    """Who watches keeps its place as long as it likes."""

    def _make_room(places: Places, *peer: Any) -> None:
        raise Refusal(Reason.TOO_MANY_WATCHERS, "all places are taken")

    patch.setattr(Places, "_make_room", _make_room)


def leases_of_who_hears_nothing(patch: pytest.MonkeyPatch) -> None:
    """Every heartbeat renews a lease."""
    original = CacheManager.keep_alive

    def keep_alive(core: CacheManager, *what: Any, **options: Any) -> Any:
        return original(core, *what, **{**options, "answer_ack": None})

    patch.setattr(CacheManager, "keep_alive", keep_alive)


BREAKS: dict[str, tuple[Break, frozenset[str]]] = {
    breaks.__name__: (breaks, frozenset(laws))
    for breaks, laws in (
        (free_while_a_step_runs, {"no use after free"}),
        (sealed_before_computed, {"one writer", "sealed-only sharing", "manager and worker agree"}),
        (hits_without_the_guard, {"sealed-only sharing", "exact hits", "manager and worker agree"}),
        (leak_on_abort, {"nothing leaks", "all goes quiet", "explained errors"}),
        (
            late_calls_executed,
            {"stale calls change nothing", "nothing leaks", "one writer", "manager and worker agree"},
        ),
        (tenants_share, {"sealed-only sharing", "exact hits", "manager and worker agree"}),
        (reserve_not_reported, {"one writer"}),
        (tables_not_reported, {"one writer"}),
        (epoch_not_raised, {"generations grow", "one writer", "no errors"}),
        (newer_process_fences, {"the first stays"}),
        (messages_raise_the_epoch, {"epochs are not spent"}),
        (stale_content_kept, {"state", "sealing", "scratch", "one writer", "manager and worker agree"}),
        (nobody_wakes_the_engine, {"no waiting beside a full reserve", "all goes quiet", "explained errors"}),
        (answers_crossed, {"one right text", "explained errors"}),
        (gate_forgets_its_base, {"one right text", "explained errors"}),
        (caches_wait_for_all_that_register, {"a report ends"}),
        (turns_without_end, {"a report ends"}),
        (places_for_those_who_come_first, {"a watcher is shown something"}),
        (leases_of_who_hears_nothing, {"no route to who hears nothing"}),
    )
}
"""What each mistake is called, and the laws of which it may break one."""

FOUND_BY = {
    "free_while_a_step_runs": 2,
    "sealed_before_computed": 31,
    "hits_without_the_guard": 2,
    "leak_on_abort": 45,
    "late_calls_executed": 29,
    "tenants_share": 3,
    "reserve_not_reported": 17,
    "tables_not_reported": 8,
    "epoch_not_raised": 8,
    "newer_process_fences": 5,
    "messages_raise_the_epoch": 11,
    "stale_content_kept": 3,
    "nobody_wakes_the_engine": 7,
    "answers_crossed": 1,
    "gate_forgets_its_base": 8,
    "caches_wait_for_all_that_register": 1,
    "turns_without_end": 16,
    "places_for_those_who_come_first": 35,
    "leases_of_who_hears_nothing": 32,
}
"""A seed that finds each mistake, and soon. It is tried first; the others follow."""

"""Where the real code reaches for what a simulated process does not have: wall clock, disk, randomness, log.

Nothing else is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import kvpool.cache_service.core.manager
import kvpool.cache_service.election.file
import kvpool.cache_service.election.kubernetes
import kvpool.cache_service.servicer
import kvpool.client.deadline
import kvpool.client.manager
import kvpool.client.stream
import kvpool.worker_service.cache.report
import kvpool.worker_service.engine.engine
import kvpool.worker_service.manager_link
import kvpool.worker_service.servicer
from kvpool.cache_service import status
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.refusal import Refusal
from kvpool.cache_service.core.session import SessionEnd
from kvpool.client import answer_streams
from kvpool.process import durable_file
from kvpool.worker_service import generate_many
from kvpool.worker_service.cache import naming
from kvpool.worker_service.cache.entry import Entry
from kvpool.worker_service.cache.groups.unit import UnitLedger
from kvpool.worker_service.cache.ledger import BlockLedger
from kvpool.worker_service.cache.link_state import LinkState
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.cache.state import CacheState

if TYPE_CHECKING:
    from tests.simulation.world import World


class _Log:
    """Into the trace; errors are broken laws, for none of these may happen in a correct system."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def _say(self, event: str, values: dict[str, Any]) -> None:
        kernel = self._world.kernel
        if kernel.is_traced:
            kernel.trace(self._name, f"{event} {' '.join(f'{key}={value!r}' for key, value in values.items())}")

    def debug(self, event: str, **values: Any) -> None:
        self._say(event, values)

    info = debug

    def warning(self, event: str, **values: Any) -> None:
        self._say(event, values)
        if "disagree" in str(values.get("why")):
            self._world.fail("one writer", f"{event}: {values['why']}")

    def error(self, event: str, **values: Any) -> None:
        self._say(event, values)
        self._world.fail("no errors", f"{self._name}: {event} {values}")

    def exception(self, event: str, **values: Any) -> None:
        import traceback

        self.error(event, **values, traceback=traceback.format_exc())

    def log(self, level: int, event: str, **values: Any) -> None:
        (self.error if level >= 40 else self.debug)(event, **values)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


@contextlib.contextmanager
def installed(world: World) -> Iterator[None]:
    """For the time of one run."""
    sequence_ids = iter(f"sequence-{number}" for number in range(1 << 30))

    def of_refusal(refusal: Refusal, original: Callable[[Refusal], Any] = status.of_refusal) -> Any:
        world.reasons[refusal.reason.value] += 1
        return original(refusal)

    def accept_grant(
        ledger: BlockLedger, block: int, generation: int, original: Any = BlockLedger.accept_grant
    ) -> None:
        original(ledger, block, generation)
        world.laws.on_grant(ledger, block, generation)

    def lose_session(state: CacheState, why: str, original: Any = CacheState.lose_session) -> None:
        if "disagree" in why:
            world.laws.on_disagreement(why)
        original(state, why)

    def accept_hits(
        ledger: BlockLedger, blocks: list[int], *about: Any, original: Any = BlockLedger.accept_hits
    ) -> Any:
        last = original(ledger, blocks, *about)
        for block in blocks:
            world.laws.on_hit(ledger, block)
        return last

    def accept_window(
        ledger: BlockLedger, entries: list[Entry], *about: Any, original: Any = BlockLedger.accept_window
    ) -> Any:
        last = original(ledger, entries, *about)
        for entry in entries:
            world.laws.on_hit(ledger, entry.block)
        return last

    def name_end(state: CacheState, sequence: CacheSequence, original: Any = naming.name_end) -> None:
        before = state.num_windows_named
        original(state, sequence)
        world.counts["windows named at the end of a text"] += state.num_windows_named - before

    def accept_unit(ledger: UnitLedger, blocks: list[int], *about: Any, original: Any = UnitLedger.accept_unit) -> None:
        original(ledger, blocks, *about)
        for block in blocks:
            world.laws.on_hit(ledger, block)

    def new_entries(link: LinkState, downlink: Any, original: Any = LinkState.new_entries) -> Any:
        entries = original(link, downlink)
        for entry in entries:
            world.downlink[entry.WhichOneof("entry") or "none"] += 1
        return entries

    def retire(core: CacheManager, session: Any, why: SessionEnd, original: Any = CacheManager._retire) -> None:
        if why is SessionEnd.FENCED:
            world.laws.on_fenced(session)
        original(core, session, why)

    deadline_init: Any = kvpool.client.deadline.Deadline.__init__
    with contextlib.ExitStack() as stack:
        for module in (
            kvpool.cache_service.election.kubernetes,
            kvpool.cache_service.servicer,
            kvpool.worker_service.engine.engine,
            kvpool.worker_service.manager_link,
            kvpool.worker_service.servicer,
        ):
            name = module.__name__.rpartition(".")[2]
            stack.enter_context(mock.patch.object(module, "log", _Log(world, name)))
        stack.enter_context(mock.patch.object(kvpool.cache_service.election.file, "os", world.disk))
        stack.enter_context(mock.patch.object(kvpool.cache_service.election.file, "fcntl", world.disk))
        stack.enter_context(mock.patch.object(durable_file, "os", world.disk))
        stack.enter_context(mock.patch.object(durable_file, "open", world.disk.open, create=True))
        stack.enter_context(
            mock.patch.object(kvpool.cache_service.core.manager, "SWEEP_SLICE_NODES", world.sweep_slice)
        )
        for name in ("_MAX_CONTENTS", "_MAX_BACKGROUND_CONTENTS", "_MAX_BLOCKS"):
            stack.enter_context(mock.patch.object(kvpool.worker_service.cache.report, name, world.report_part))
        stack.enter_context(mock.patch.object(generate_many, "MESSAGE_BYTES", world.message_bytes))
        stack.enter_context(mock.patch.object(answer_streams, "MAX_REQUESTS", world.stream_requests))
        stack.enter_context(mock.patch.object(answer_streams, "MAX_AGE_SECONDS", world.stream_seconds))
        stack.enter_context(mock.patch.object(kvpool.client.stream, "uuid4", sequence_ids.__next__))
        stack.enter_context(mock.patch.object(kvpool.client.manager, "random", world.kernel.random("client")))
        stack.enter_context(
            mock.patch.object(kvpool.client.manager, "time", types.SimpleNamespace(monotonic=_loop_time))
        )
        stack.enter_context(mock.patch.object(status, "of_refusal", of_refusal))
        stack.enter_context(mock.patch.object(BlockLedger, "accept_grant", accept_grant))
        stack.enter_context(mock.patch.object(BlockLedger, "accept_hits", accept_hits))
        stack.enter_context(mock.patch.object(CacheState, "lose_session", lose_session))
        stack.enter_context(mock.patch.object(BlockLedger, "accept_window", accept_window))
        stack.enter_context(mock.patch.object(UnitLedger, "accept_unit", accept_unit))
        stack.enter_context(mock.patch.object(LinkState, "new_entries", new_entries))
        stack.enter_context(mock.patch.object(naming, "name_end", name_end))
        stack.enter_context(mock.patch.object(CacheManager, "_retire", retire))
        before = deadline_init.__defaults__
        deadline_init.__defaults__ = (_loop_time,)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            deadline_init.__defaults__ = before
            if was_enabled:
                gc.enable()

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

from kvpool.cache_service import servicer, status
from kvpool.cache_service.core import manager as core_manager
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.session import SessionEnd
from kvpool.cache_service.election import file, kubernetes
from kvpool.client import answer_streams, stream
from kvpool.client import manager as client_manager
from kvpool.client.deadline import Deadline
from kvpool.process import durable_file
from kvpool.worker_service import generate_many, manager_link
from kvpool.worker_service import servicer as worker_servicer
from kvpool.worker_service.cache import naming, report
from kvpool.worker_service.cache.entry import Entry
from kvpool.worker_service.cache.groups.unit import UnitLedger
from kvpool.worker_service.cache.ledger import BlockLedger
from kvpool.worker_service.cache.link_state import LinkState
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.cache.state import CacheState
from kvpool.worker_service.engine import engine

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

    info = warning = debug

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


def _watched(kind: Any, name: str, look: Callable[..., None]) -> tuple[Any, str, Any]:
    """A function as it is, and after each call of it `look` gets what it has returned, and was given."""
    original = getattr(kind, name)

    def function(*arguments: Any) -> Any:
        result = original(*arguments)
        look(result, *arguments)
        return result

    return kind, name, function


@contextlib.contextmanager
def installed(world: World) -> Iterator[None]:
    """For the time of one run."""
    counts = world.counts.update
    sequence_ids = iter(f"sequence-{number}" for number in range(1 << 30))

    def name_end(state: CacheState, sequence: CacheSequence, original: Any = naming.name_end) -> None:
        before = state.num_windows_named
        original(state, sequence)
        world.counts["windows named at the end of a text"] += state.num_windows_named - before

    def on_disagreement(_: Any, state: CacheState, why: str) -> None:
        if "disagree" in why:
            world.fail("manager and worker agree", why)

    def on_hits(_: Any, ledger: BlockLedger, hits: list[Any], *about: Any) -> None:
        for hit in hits:
            world.laws.on_hit(ledger, hit.block if isinstance(hit, Entry) else hit)

    def on_retired(_: Any, core: CacheManager, session: Any, why: SessionEnd) -> None:
        if why is SessionEnd.FENCED:
            world.laws.on_fenced(session)

    replaced: list[tuple[Any, str, Any]] = [
        (file, "os", world.disk),
        (file, "fcntl", world.disk),
        (durable_file, "os", world.disk),
        (durable_file, "open", world.disk.open),
        (core_manager, "SWEEP_SLICE_NODES", world.sweep_slice),
        *((report, name, world.report_part) for name in ("_MAX_CONTENTS", "_MAX_BACKGROUND_CONTENTS", "_MAX_BLOCKS")),
        (generate_many, "MESSAGE_BYTES", world.message_bytes),
        (answer_streams, "MAX_REQUESTS", world.stream_requests),
        (answer_streams, "MAX_AGE_SECONDS", world.stream_seconds),
        (stream, "uuid4", sequence_ids.__next__),
        (client_manager, "random", world.kernel.random("client")),
        (client_manager, "time", types.SimpleNamespace(monotonic=_loop_time)),
        (naming, "name_end", name_end),
        _watched(status, "of_refusal", lambda _, refusal: counts([f"refusal: {refusal.reason.value}"])),
        _watched(
            LinkState, "new_entries", lambda new, *_: counts(f"downlink: {one.WhichOneof('entry')}" for one in new)
        ),
        _watched(BlockLedger, "accept_grant", lambda _, *grant: world.laws.on_grant(*grant)),
        _watched(BlockLedger, "accept_hits", on_hits),
        _watched(BlockLedger, "accept_window", on_hits),
        _watched(UnitLedger, "accept_unit", on_hits),
        _watched(CacheState, "lose_session", on_disagreement),
        _watched(CacheManager, "_retire", on_retired),
        (Deadline.__init__, "__defaults__", (_loop_time,)),
        *(
            (module, "log", _Log(world, module.__name__.rpartition(".")[2]))
            for module in (kubernetes, servicer, engine, manager_link, worker_servicer)
        ),
    ]
    with contextlib.ExitStack() as stack:
        for target, name, value in replaced:
            stack.enter_context(mock.patch.object(target, name, value, create=name == "open"))
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()

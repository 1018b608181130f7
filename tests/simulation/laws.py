"""The laws that go beyond one process, and when which law is looked at.

After each event those of what it touched, all of them at every fault and at the end. Each look is counted: a law that was never
looked at proves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.cache_service.core.block_pool import HELD, RESERVED, BlockPool
from kvpool.cache_service.core.groups.unit_pool import UnitPool
from kvpool.cache_service.core.integrity.findings import Audit
from kvpool.cache_service.core.integrity.pools import PoolLaws
from kvpool.cache_service.core.integrity.sequences import SequenceLaws
from kvpool.cache_service.core.manager import REPORT_FIRST_SECONDS
from kvpool.cache_service.core.messages import TOKEN_BYTES, Root
from kvpool.cache_service.core.report_turns import MOST_LEASES
from kvpool.cache_service.core.session import Session
from kvpool.cache_service.election.epoch import MAX_FOREIGN_EPOCH
from kvpool.cache_service.foreign_epochs import MAX_RAISE
from kvpool.worker_service.cache.groups.unit import Unit
from kvpool.worker_service.cache.ledger import BlockLedger, Content
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.engine.beams import BeamRequest
from tests.simulation.manager import LEASE_SECONDS
from tests.simulation.rpc import Failure, reason_in
from tests.simulation.strangers import HOLE_SECONDS

if TYPE_CHECKING:
    from tests.simulation.manager import ManagerProcess
    from tests.simulation.process import Process
    from tests.simulation.worker import WorkerProcess
    from tests.simulation.world import World

_OF_A_SESSION = (
    "conservation",
    "references",
    "free list",
    "state",
    "null block",
    "generation",
    "sealing",
    "fork",
    "chain",
    "scratch",
    "window",
    "unit",
)
OF_THE_CORE = (*_OF_A_SESSION, "tree", "attempts", "dependents")
"""The laws of cache_service/core/integrity."""
OF_PROGRESS = ("a report ends", "a watcher is shown something", "no route to who hears nothing")
"""Each within a stated time, whatever others do; see tests/simulation/strangers.py."""
OF_THE_WHOLE = (
    "one writer",
    "generations grow",
    "one manager leads",
    "the first stays",
    "epochs are not spent",
    "exact hits",
    "no step reads a hole",
    "sealed-only sharing",
    "sealed blocks never change",
    "no use after free",
    "stale calls change nothing",
    "no waiting beside a full reserve",
    "manager and worker agree",
    "one right text",
    "explained errors",
    "nothing leaks",
    "all goes quiet",
    "who has left is gone",
    *OF_PROGRESS,
)
_SLACK_SECONDS = 2.0
"""For retries, ticks, and clocks that differ."""
_SHOWN_SECONDS = 15.0
"""A manager's restart, the silence after which a stream is opened again, and some retries."""
_UNHEARD_SECONDS = 4.0
"""Until the last answer is acknowledged, by a slow clock, and the lease is looked at."""
_MUTATING = frozenset({"Report", "Allocate", "Append", "Fork", "Free"})
_SPOKEN_IN_A_SESSION = _MUTATING | {"KeepAlive", "Deregister"}
"""What may be too late."""


class Laws:
    """Looks at the laws of one run and tells the world what is broken."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._num_sessions = 0
        """How often the laws of one session were looked at; counted together at the end."""
        self._before: Any = None
        self._said_good_bye: dict[Process, Process] = {}
        """Workers whose Deregister was executed, and the life of the manager that did."""
        self._left: set[tuple[Process, str, int]] = set()
        """Life of the manager, worker_id and incarnation of those who were told that nothing of them is left, until a newer process
        of the worker has registered."""
        self._holders: dict[int, Process] = {}
        """The process that each session was given to."""
        self._fenced: list[Session] = []
        """Sessions that a Register has ended whose answer was not looked at yet."""
        self._newest: dict[str, int] = {}
        """The incarnation of each worker that began its last session."""
        self._epoch = 0
        self._served_at: dict[tuple[Process, int], float] = {}
        """When the in-use part of the report of a session came, by life of the manager."""

    def count(self, law: str, times: int = 1) -> None:
        self.world.counts[f"law: {law}"] += times

    # -- the manager

    def before_call(self, server: Process, method: str) -> None:
        """Remember what a refused call must leave as it is."""
        if hasattr(server, "core") and method in _SPOKEN_IN_A_SESSION:
            self._before = self._figures(server)

    def on_leading(self, manager: ManagerProcess) -> None:
        """A manager begins to lead. With clocks that run at about the same pace, and the Lease in its place, no other one does."""
        world = self.world
        others = [other for other in world.living_managers() if other is not manager and other.leads()]
        world.counts["managers that led at the same time"] += bool(others)
        if manager.has_odd_clock or world.lease_server.is_deleted:
            return
        self.count("one manager leads")
        for other in others:
            if not other.has_odd_clock:
                world.fail("one manager leads", f"{manager.name} leads, and {other.name} still does")
        epochs = [other.core.epoch for other in others]
        if manager.core.epoch in epochs:
            world.fail("one manager leads", f"{manager.name} has the epoch {manager.core.epoch} of another one")

    def on_fenced(self, session: Session) -> None:
        self._fenced.append(session)

    def _figures(self, manager: Any) -> Any:
        """What a refused call leaves as it is: the last call_no of each session, and the rest."""
        core = manager.core
        sizes = [
            (
                session.number,
                session.downlink.last_number,
                len(session.sequences),
                session.pools[0].num_available,
                session.pools[0].num_reserved,
            )
            for session in core.sessions
        ]
        return {session.number: session.last_call_no for session in core.sessions}, core.last_generation, sizes

    def after_call(
        self, server: Process, method: str, request: Any, response: Any, failure: Failure | None, caller: Process
    ) -> None:
        world = self.world
        if not hasattr(server, "core"):
            return  # a worker, or a manager that stands by
        world.counts[f"operation: {method}"] += 1
        manager: Any = server
        if world.kernel.is_traced:
            said = _in_words(method, request, response, failure)
            world.kernel.trace(manager.name, f"{method} of {caller.name}: {said}")
        if failure is not None:
            reason = reason_in(failure)
            if reason in ("STALE_CALL", "STALE_SESSION", "RECOVERING") and method in _SPOKEN_IN_A_SESSION:
                self.count("stale calls change nothing")
                expected, found = self._before, self._figures(manager)
                if reason == "RECOVERING" and method == "Report":
                    # A part that has to wait uses up its call_no; that is all.
                    for call_nos, *_ in (expected, found):
                        call_nos.pop(request.uplink.session, None)
                if found != expected:
                    what = f"{method} was refused with {reason} and changed {expected} to {found}"
                    world.fail("stale calls change nothing", what)
            return
        if method == "Deregister":
            # While two lead, as after a Lease was deleted, one may have a session that the other one was told to end; it
            # ends with its lease.
            if not any(other is not server and other.leads() for other in world.living_managers()):
                self._said_good_bye[caller] = server
        elif method == "Register":
            name, incarnation = request.worker_id, request.incarnation
            if (server, name, incarnation) in self._left:
                world.fail("who has left is gone", f"{caller.name} has left, and a Register of it begins a session")
            self._left = {gone for gone in self._left if gone[1] != name or gone[2] >= incarnation}
            self._first_stays(request, response, caller)
            self._epochs_are_not_spent(manager)
        elif method == "Route":
            self._route_to_who_hears(manager, response)
        elif method == "Report" and request.live:
            self._served_at.setdefault((server, request.uplink.session), world.kernel.now)
        if method in _MUTATING:
            session = manager.core._sessions.get(request.uplink.session)
            if method == "Allocate":
                self._count_allocated(session, request, response)
            if session is not None:
                self.of_session(manager, session)

    def _count_allocated(self, session: Session | None, request: Any, response: Any) -> None:
        counts = self.world.counts
        for item, result in zip(request.items, response.results, strict=True):
            granted = result.granted if result.HasField("granted") else None
            counts["prefixes waited for"] += result.HasField("wait")
            counts["windows hit"] += bool(granted and granted.scratch and granted.num_cached_tokens)
            if item.num_encoder_tokens:
                counts["units waited for"] += result.HasField("wait") and not result.wait.position
                counts["units hit"] += bool(granted and granted.encoder_cached)
                counts["prefixes hit without their unit"] += bool(
                    granted and granted.num_cached_tokens and not granted.encoder_cached
                )
            if session is None:
                continue
            step = session.grid_blocks * session.block_size
            asked = {boundary // step * step for boundary in item.boundaries}
            interval = -(-item.retention_interval_tokens // step) * step
            for boundary in result.granted.boundaries:
                if boundary == (len(item.tokens) // TOKEN_BYTES - 1) // step * step:
                    kind = "at the end of a prompt"
                elif boundary in asked:
                    kind = "that a request asked for"
                elif interval and boundary % interval == 0:
                    kind = "at an interval"
                else:
                    kind = "where prompts part"
                counts[f"boundaries {kind}"] += 1

    def _first_stays(self, request: Any, response: Any, caller: Process) -> None:
        """A process whose session lives is fenced by itself only, or when it has ended."""
        self.count("the first stays")
        for session in [session for session in self._fenced if session.worker_id == request.worker_id]:
            self._fenced.remove(session)
            holder = self._holders.get(session.number)
            # Strangers who made up the same process, without a key, are one to the manager. A worker has a key.
            is_stranger = holder in self.world.clients
            if holder is not None and holder is not caller and not holder.is_dead and not is_stranger:
                self.world.fail("the first stays", f"{caller.name} has taken the place of {holder.name}, which lives")
        self._holders[response.session] = caller
        if request.incarnation < self._newest.get(request.worker_id, 0):
            self.world.counts["older incarnations accepted"] += 1
        self._newest[request.worker_id] = request.incarnation

    def _epochs_are_not_spent(self, manager: Any) -> None:
        """Whatever workers say, one life of the manager uses up few."""
        self.count("epochs are not spent")
        first, now = manager.first_epoch, manager.core.epoch
        self.world.counts["epochs raised"] += first < now != self._epoch
        self._epoch = now
        if now > max(first, min(first + MAX_RAISE, MAX_FOREIGN_EPOCH)):
            self.world.fail("epochs are not spent", f"{manager.name} began with epoch {first} and is at {now}")

    def of_session(self, manager: ManagerProcess, session: Session) -> None:
        """The laws of one session's blocks and sequences, and that its worker means the same by them."""
        core = manager.core
        findings = Audit(1 << 20)
        pools = [PoolLaws(session, group, lambda: core.last_generation, findings).course() for group in session.by_slot]
        for course in (*pools, SequenceLaws(session, findings).course()):
            for _ in course:
                pass
        self._num_sessions += 1
        if findings.violations:
            self.world.fail(findings.violations[0].law, f"{manager.name}: {findings.violations[0]}")
        counts = self.world.counts
        for pool in session.pools:
            if isinstance(pool, UnitPool):
                counts["sessions with an encoder"] += 1
                counts["blocks of units evicted"] += pool.num_evicted
            counts["windows released to be evicted first"] += len(pool.demoted())
            counts["blocks shared"] += pool.counts().shared
            counts["evictions"] += pool.num_evicted
            pool.num_evicted = 0
        if not session.recovering:
            for worker in self.world.live_workers():
                if worker.cache.session == session.number and worker.cache.is_ready():
                    self._one_writer(worker, session)

    def _one_writer(self, worker: WorkerProcess, session: Session) -> None:
        self.count("one writer")
        if session.worker_id != worker.plan.worker_id or session.registration.incarnation != worker.incarnation:
            self.world.fail("one writer", f"{worker.name} speaks in a session of {session.registration!r}")
            return
        for sequence, by_group in worker.live_blocks():
            for pool, blocks in zip(session.pools, by_group, strict=True):
                for block, generation in blocks:
                    if pool.generation(block) != generation or pool.state(block) not in (HELD, RESERVED):
                        used = f"{sequence!r} on {worker.name} uses block {block} of group {pool.slot}"
                        here = f"{pool.state(block).name} of generation {pool.generation(block):#x}"
                        what = f"{used} and generation {generation:#x}; the manager has it as {here}"
                        self.world.fail("one writer", what)
                        return

    # -- workers

    def after_worker_turn(self, worker: WorkerProcess) -> None:
        """Whenever no step runs, no sequence could."""
        engine = worker.engine
        if worker.is_dead or worker.is_leaving or worker.gpu.is_busy or engine._wake.is_set():
            return
        self.count("no waiting beside a full reserve")
        for request, sequence in [(one, of_it) for one in engine.scheduler._running for of_it in one.sequences]:
            if not sequence.num_uncomputed_tokens:
                continue  # a beam that waits for the others, or for the blocks of a fork
            # A granted prompt has its blocks; beams that are computed again are forks, and get theirs as decodes do.
            has_all = sequence.num_uncomputed_tokens > 1 and not isinstance(request, BeamRequest)
            if has_all or self._has_blocks(worker, sequence):
                self.world.fail("no waiting beside a full reserve", f"{worker.name} is idle, and {request!r} could run")
                return

    def _has_blocks(self, worker: WorkerProcess, sequence: CacheSequence) -> bool:
        """Whether the reserves have what the next step of a sequence needs."""
        state = worker.cache.state
        num_tokens = min(sequence.num_uncomputed_tokens, worker.engine.scheduler.max_chunk_tokens)
        num_slots = sequence.num_computed_tokens + num_tokens
        return all(
            table.num_missing(sequence.num_computed_tokens, num_slots) <= len(reserve)
            for table, reserve in zip(sequence.group_tables, state.reserves, strict=False)
        )

    def on_exit(self, worker: WorkerProcess) -> None:
        """A worker that was told to leave exits. Whatever it has said may still be on its way."""
        manager: Any = self._said_good_bye.get(worker)
        if not worker.link.has_left or manager is None:
            return
        self.count("who has left is gone")
        self._left.add((manager, worker.plan.worker_id, worker.incarnation))
        if not manager.is_dead:
            for session in manager.core.sessions:
                introduction = session.registration
                if (introduction.worker_id, introduction.incarnation) == (worker.plan.worker_id, worker.incarnation):
                    self.world.fail("who has left is gone", f"{worker.name} has left, and {session!r} lives")

    def on_grant(self, ledger: BlockLedger, block: int, generation: int) -> None:
        self.count("generations grow")
        for worker in self.world.live_workers():
            ledgers = worker.cache.state.ledgers
            if ledger in ledgers:
                if worker.granted_in is not ledgers:
                    worker.granted_in, worker.granted = ledgers, {}
                if generation <= worker.granted.get((ledger.group, block), 0):
                    what = f"{worker.name}: block {block} was granted twice as {generation:#x}"
                    self.world.fail("generations grow", what)
                worker.granted[ledger.group, block] = generation

    def on_hit(self, ledger: BlockLedger, block: int) -> None:
        """A worker has accepted a hit: its KV must be there by now."""
        self.count("sealed-only sharing")
        for worker in self.world.live_workers():
            if ledger in worker.cache.state.ledgers:
                content = ledger.content(block)
                if content is None or not worker.gpu.holds(ledger.group, block, content):
                    what = f"{worker.name}: block {block} is a hit before its KV is there"
                    self.world.fail("sealed-only sharing", what)

    # -- progress

    def seconds_to_report(self) -> float:
        """In which a worker that is served completes its report in a network that works, however many others never end theirs."""
        num_others = self.world.limits.max_reports_at_once + 1 + len(self.world.machines)
        num_before = -(-num_others // self.world.limits.max_reports_at_once)
        return REPORT_FIRST_SECONDS + _SLACK_SECONDS + num_before * (MOST_LEASES * LEASE_SECONDS + _SLACK_SECONDS)

    def of_progress(self) -> None:
        """Once all has healed."""
        world = self.world
        healed_at, now = world.strangers.healed_at, world.kernel.now
        manager = world.manager
        if healed_at is None or manager is None or not hasattr(manager, "core"):
            return
        for session in manager.core.sessions:
            served_at = self._served_at.get((manager, session.number))
            if served_at is None or session.number not in manager.core._recoveries or manager.has_odd_clock:
                continue
            if any(worker.cache.session == session.number for worker in world.live_workers()):
                self.count("a report ends")
                if now - max(served_at, healed_at) > self.seconds_to_report():
                    what = f"{session!r} is served for {now - served_at:.1f} s, and its report goes on"
                    world.fail("a report ends", what)
        viewer = world.strangers.viewer
        if viewer is not None:
            self.count("a watcher is shown something")
            if now - max(viewer.shown_at, healed_at) > _SHOWN_SECONDS:
                what = f"{viewer.name} has seen nothing since {viewer.shown_at:.1f} s"
                world.fail("a watcher is shown something", what)

    def _route_to_who_hears(self, manager: Any, response: Any) -> None:
        hole = self.world.strangers.hole
        if hole is None or manager.has_odd_clock:
            return
        since = self.world.kernel.now - hole.began_at
        if not LEASE_SECONDS + _UNHEARD_SECONDS < since < HOLE_SECONDS:
            return
        if not self.world.bus.link(manager.machine, hole.worker.machine).num_cuts:
            return  # the end of an earlier cut has ended this one too
        self.count("no route to who hears nothing")
        for routed in response.workers:
            incarnation = manager.core.worker(routed.worker_id).registration.incarnation
            if (routed.worker_id, incarnation) == (hole.worker.plan.worker_id, hole.worker.incarnation):
                what = f"Route names {routed.worker_id}, which hears nothing for {since:.1f} s"
                self.world.fail("no route to who hears nothing", what)

    # -- everything

    def all(self) -> None:
        """Every law that holds at any time."""
        for manager in self.world.living_managers():
            self._all_of(manager)

    def _all_of(self, manager: ManagerProcess) -> None:
        for violation in manager.core.check().violations:
            self.world.fail(violation.law, f"{manager.name}: {violation}")
        for law in OF_THE_CORE:
            self.count(law)
        for worker in self.world.live_workers():
            session = manager.core._sessions.get(worker.cache.session)
            if session is not None and not session.recovering and worker.cache.is_ready():
                self._one_writer(worker, session)
                self._agreement(manager, worker, session)

    def _agreement(self, manager: ManagerProcess, worker: WorkerProcess, session: Session) -> None:
        """What the manager has as a hit, the worker has complete, and the GPU has it right."""
        self.count("manager and worker agree")
        for ledger, pool in zip(worker.cache.state.ledgers, session.pools, strict=True):
            for block in range(1, pool.num_blocks):
                node = pool.node(block)
                broken = None if node is None else self._disagreement(manager, worker, ledger, pool, block, node)
                if broken is not None:
                    law, found = broken
                    sealed = f"block {block} of generation {pool.generation(block):#x} is sealed at the manager"
                    self.world.fail(law, f"{worker.name}: {sealed}; {found}")
                    return

    def _disagreement(
        self,
        manager: ManagerProcess,
        worker: WorkerProcess,
        ledger: BlockLedger,
        pool: BlockPool,
        block: int,
        node: Any,
    ) -> tuple[str, str] | None:
        """The law that a sealed block breaks, and how; None if all is right."""
        content, generation = ledger.content(block), ledger._generation[block]
        if content is None or generation != pool.generation(block):
            return "manager and worker agree", f"here it has generation {generation:#x} and {content}"
        if not worker.gpu.holds(pool.slot, block, content):
            return "exact hits", "its slots hold something else"
        at: Content | None = content
        if isinstance(content, Unit):
            at = None if isinstance(pool, UnitPool) else content
        else:
            while at is not None and node is not None and node.tokens == at.tokens:
                at, node = at.parent, node.parent
        root = content.root
        key = Root(root.model_fingerprint, root.adapter, root.tenant_salt, root.input_digest)
        if (
            at is not None
            or node is None
            or node is not manager.core._tree.find_root(key, worker.cache.settings.block_size)
        ):
            return "manager and worker agree", "the two know other contents in it"
        return None

    def at_the_end(self) -> None:
        """All has ended and everybody was heard: nothing is held, and the caches are equal block by block."""
        manager = self.world.manager
        assert manager is not None
        for law in _OF_A_SESSION:
            self.count(law, self._num_sessions)
        self.all()
        for worker in self.world.live_workers():
            self.count("nothing leaks")
            session = manager.core._sessions[worker.cache.session]
            for counts in session.counts():
                is_used = counts.held or counts.reserved or counts.free + counts.cached != counts.capacity
                if is_used or session.sequences:
                    self.world.fail("nothing leaks", f"{worker.name}: {counts}, {list(session.sequences)}")
            state = worker.cache.state
            is_used = any(ledger.num_used for ledger in state.ledgers) or any(state.reserves)
            if is_used or state.sequences or state.ending or state.parked:
                self.world.fail("nothing leaks", f"{worker.name} still holds {list(state.sequences)}")
            for ledger, pool in zip(state.ledgers, session.pools, strict=True):
                for block in range(1, pool.num_blocks):
                    if ledger.content(block) is None and pool.is_cached(block):
                        what = f"{worker.name}: block {block} is cached at the manager only"
                        self.world.fail("manager and worker agree", what)


def _in_words(method: str, request: Any, response: Any, failure: Failure | None) -> str:
    if failure is not None:
        return f"{failure.code.name} {reason_in(failure)}: {failure.details}"
    head = f"call {request.uplink.call_no} of {request.uplink.session:#x}: " if method in _MUTATING else ""
    return f"{head}{_short(request)} → {_short(response)}"


def _short(message: Any) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= 400 else f"{text[:400]}…"

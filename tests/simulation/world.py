"""One run: processes, network, disk, workload and faults of one seed, until all is quiet or a law is broken."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvpool.cache_service.core.messages import Limits
from kvpool.cache_service.election.epoch import MAX_EPOCH, MAX_FOREIGN_EPOCH
from kvpool.cache_service.election.file import encode
from kvpool.protocol.tokens import input_digest
from kvpool.worker_service.cache.groups.unit import UnitGroup
from kvpool.worker_service.engine.beam_search import BeamParams
from kvpool.worker_service.engine.policy import SchedulingPolicy
from tests import tracer
from tests.cache_groups import groups_of
from tests.simulation import patches
from tests.simulation.bus import Bus
from tests.simulation.channel import Channel, LeaderChannel
from tests.simulation.client_process import TIMEOUT_SECONDS, ClientProcess, RequestPlan
from tests.simulation.disk import Disk
from tests.simulation.faults import FAULTS, NotNow
from tests.simulation.kernel import Kernel
from tests.simulation.laws import Laws
from tests.simulation.lease_server import LeaseServer
from tests.simulation.manager import MACHINES, ManagerProcess, address_of
from tests.simulation.process import Process
from tests.simulation.strangers import Strangers
from tests.simulation.worker import (
    BLOCK_SIZE,
    FINGERPRINT,
    MAX_ENCODER_TOKENS,
    MAX_MODEL_LEN,
    START,
    Machine,
    WorkerPlan,
    WorkerProcess,
)
from tests.tracer_beams import expected_beams

_OPERATIONS = ("client's ", "Register", "Deregister", "Report", "Allocate", "Append", "Fork", "Free")
ACTIVE_SECONDS = 22.0
"""Requests and faults come in this time; then everything heals."""
_QUIET_SECONDS = 60.0
MAX_EVENTS = 200_000
LAYOUTS = (
    *("full", "full", "full+full", "full+sliding", "full+sliding", "sliding", "sliding+full+sliding"),
    *("full+state", "full+state", "state", "full+sliding+state"),
)
"""The groups of a worker."""
FIRST_EPOCHS = (0, 0, 0, 6, 1 << 16, 1 << 20, MAX_FOREIGN_EPOCH - 3, MAX_FOREIGN_EPOCH + 9, MAX_EPOCH - 100)
"""That the state file holds at the beginning; 0: there is none. A run takes some dozens."""


class Violation(NamedTuple):
    law: str
    message: str
    at: float


@dataclass
class Result:
    seed: int
    digest: str
    violation: Violation | None
    num_events: int
    seconds: float
    """Of virtual time."""
    lines: list[str]
    counts: Counter[str]
    """As the world's."""

    @property
    def num_operations(self) -> int:
        """What clients have asked for (attempts at requests, their ends by the reader, routes, descriptions, checks, drains), and
        what workers have told or asked the manager. Heartbeats are none."""
        operations = tuple(f"operation: {name}" for name in _OPERATIONS)
        return sum(count for name, count in self.counts.items() if name.startswith(operations))

    @property
    def num_faults(self) -> int:
        return sum(count for name, count in self.counts.items() if name.startswith("fault: "))


class World:
    """Everything that one seed decides."""

    def __init__(self, seed: int, *, is_traced: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        """How often what was reached. Laws (how often each was looked at), faults, operations, refusals, cases of reconciliation,
        entries of downlinks and outcomes have their kind before their name."""
        self.kernel = Kernel(seed, is_traced=is_traced)
        self.violation: Violation | None = None
        self.bus = Bus(self)
        self.laws = Laws(self)
        self.disk = Disk(self.kernel.random("disk"))
        self.lease_server = LeaseServer(self)
        self.leader_lease = self.kernel.random("election").choice([0, 0, 0, 0, 0, 2, 3])
        """Seconds: two managers, of which one leads by a Lease. 0: one manager, with its epoch in a file."""
        self.manager_machines = MACHINES if self.leader_lease else MACHINES[:1]
        self.manager_addresses = tuple(map(address_of, self.manager_machines))
        self._managers: dict[str, ManagerProcess] = {}
        """The last process of each machine."""
        self._last_leader: ManagerProcess | None = None
        self.machines: dict[str, Machine] = {}
        """Of workers, by name; a rival process of a worker has one of its own."""
        self.clients: list[ClientProcess] = []
        self.processes: list[Process] = []
        """All, each from its start on."""
        self.is_watching = False
        """A fault waits for its moment."""
        self._draw = self.kernel.random("world")
        self._num_managers = 0
        self._is_healed = False
        self._is_over = False
        self._num_ended = 0
        self._right: dict[int, list[tuple[list[int], bool]]] = {}
        self._make_plans()
        self.strangers = Strangers(self)

    def _make_plans(self) -> None:
        draw = self._draw
        order = self.kernel.random("order")
        self.step_seconds = draw.choice([0.01, 0.03, 0.08])
        self.sweep_slice = draw.choice([2, 8, 2048])
        self.is_sweeping_slowly = draw.random() < 0.5
        self.report_part = draw.choice([2, 5, 1024])
        self.limits = Limits(
            max_sequences_per_session=draw.choice([3, 4096, 4096]),
            max_downlink_entries=draw.choice([2, 8192, 8192]),
            max_reports_at_once=draw.choice([1, 4]),
            max_boundaries=self.kernel.random("boundaries").choice([1, 2, 8]),
        )
        streams = self.kernel.random("streams")
        self.stream_requests = streams.choice([1, 3, 256])
        """That a client sends over one stream."""
        self.stream_seconds = streams.choice([0.5, 60.0])
        """After which it sends no more over one."""
        self.message_bytes = streams.choice([1, 1 << 16])
        """Of answers that a worker sends together."""
        groups, forks, answers = (self.kernel.random(name) for name in ("groups", "forks", "answers"))
        encoder = self.kernel.random("encoder")
        self.has_encoder = encoder.random() < 0.3
        """Of all workers: they serve one model."""
        self.inputs: dict[bytes, list[int]] = {}
        """Inputs of the encoder by digest."""
        has_small = draw.random() < 0.15
        self.plans: list[WorkerPlan] = []
        for number in range(draw.choice([2, 2, 3])):
            smallest = MAX_MODEL_LEN // BLOCK_SIZE + 1
            num_blocks = draw.choice([smallest, smallest + 5, smallest + 18])
            if has_small and number == 1:
                num_blocks = 8
            pools: tuple[int, ...] = (num_blocks,)
            windows: tuple[int, ...] = (0,)
            state_grid = 0
            kind = groups.choice(LAYOUTS)
            self.counts[f"layout: {kind}"] += 1
            if kind == "full+full":
                pools += (groups.choice([num_blocks, smallest, smallest + 9]),)
                windows = (0, 0)
            elif kind != "full":
                parts = kind.split("+")
                windows = tuple(groups.choice([2, 5, 8, 9, 13]) if part == "sliding" else 0 for part in parts)
                state_grid = groups.choice([4, 8, 12]) if "state" in parts else 0
                # From just enough for one sequence to more than enough for all.
                least = {
                    "full": [num_blocks],
                    "sliding": [8 + (state_grid > 4) * 2, 10, 14, 40],
                    "state": [4, 6, 10, 30],
                }
                pools = tuple(groups.choice(least[part]) for part in parts)
            layout = list(groups_of(pools, windows, grid=state_grid))
            if self.has_encoder:
                # After the groups of the decoder's own attention; the states, if there are any, are always the last.
                num_units = encoder.choice([8, 10, 12, 24, 60])
                layout.insert(len(layout) - bool(state_grid), UnitGroup(num_units, MAX_ENCODER_TOKENS))
            self.plans.append(
                WorkerPlan(
                    worker_id=f"w{number}",
                    groups=tuple(layout),
                    retention_interval=groups.choice([0, 0, 0, 6, 16]),
                    max_num_seqs=draw.choice([2, 4, 6]),
                    max_num_batched_tokens=draw.choice([8, 16, 40]),
                    reserve_seconds=draw.choice([0.2, 2.0]),
                    prefix_wait_seconds=draw.choice([0.3, 10.0]),
                    report_seconds=draw.choice([0.01, 0.05, 0.3]),
                    policy=order.choice(list(SchedulingPolicy)),
                    max_mixed_prefill_tokens=order.choice([1, 5, 512]),
                    max_num_waiting=order.choice([3, 40, 40]),
                    max_requests_of_stream=streams.choice([1, 2, 4096]),
                    fork_rate=forks.choice([0.0, 0.02, 0.1, 0.4]),
                )
            )
        has_small = has_small or any(plan.cache_settings().capacity * BLOCK_SIZE < MAX_MODEL_LEN for plan in self.plans)
        self.client_names = ["c0", "c1"]
        bases = [[draw.randrange(tracer.VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
        self.requests: list[RequestPlan] = []
        asked = self.kernel.random("asked boundaries")
        for number in range(draw.randint(35, 39)):
            if self.requests and draw.random() < 0.15:
                prompt, salt = list(self.requests[-1].prompt), self.requests[-1].tenant_salt
            else:
                base = draw.choice(bases)
                prompt = base[: draw.choice([0, 8, 16, 24])]
                prompt += [draw.randrange(tracer.VOCAB_SIZE) for _ in range(draw.randint(0 if prompt else 1, 9))]
                salt = draw.choice(["", "", "tenant"])
            if self.has_encoder:
                if self.requests and encoder.random() < 0.5:
                    prompt = encoder.choice(self.requests).prompt
                self.inputs[input_digest(prompt)] = prompt
            max_tokens = draw.choice([1, 2, 4, 6, 9, 13])
            plan = RequestPlan(
                number=number,
                tenant_salt=salt,
                prompt=prompt,
                max_tokens=None if draw.random() < 0.03 and not has_small else max_tokens,
                cancel_after=draw.expovariate(1.0) if draw.random() < 0.15 else None,
                pause=draw.choice([0.0, 0.0, 0.0, 0.0, 0.2]),
                tenant=order.choice(["", "", "a", "b"]),
                priority=order.choice([0, 0, -1, 1]),
                boundaries=asked.choice([(), (), (8,), (16, 24), (6, 13, 100)]),
            )
            self.requests.append(self._with_answers(answers, plan))

    def _with_answers(self, draw: random.Random, request: RequestPlan) -> RequestPlan:
        """With one answer, several, or a search, for which every worker has places. A search without a limit is as long as the pool
        lets it be."""
        if draw.random() < 0.75:
            return request
        most = min(4, *(plan.max_num_seqs for plan in self.plans))
        if draw.random() < 0.5 or most < 2 or request.max_tokens is None:
            return replace(request, n=draw.randint(2, 5))
        num_beams = draw.randint(2, most)
        return replace(request, num_beams=num_beams, n=draw.randint(1, num_beams))

    # -- asked by processes

    def fail(self, law: str, message: str) -> None:
        """A law is broken: the run ends here. The first one tells what happened."""
        if self.violation is None and not self._is_over:
            self.violation = Violation(law, message, self.kernel.now)
            self.kernel.trace("LAW", f"{law}: {message}")

    def live_workers(self) -> list[WorkerProcess]:
        """Processes of workers that have not ended, superseded ones too."""
        return [process for process in self.processes if isinstance(process, WorkerProcess) and not process.is_dead]

    def live_clients(self) -> list[ClientProcess]:
        return [client for client in self.clients if not client.is_dead]

    def right_texts(self, plan: RequestPlan) -> list[tuple[list[int], bool]]:
        """What a request has to be answered, and whether the model ends it: for each of its answers."""
        found = self._right.get(plan.number)
        if found is None:
            limit = self._most_tokens(plan)
            prompt, encoder_tokens = ([START], plan.prompt) if self.has_encoder else (plan.prompt, [])
            salt = plan.tenant_salt
            if plan.num_beams > 1:
                params = BeamParams(plan.num_beams)
                found = expected_beams(prompt, limit, params, tracer.EOS, salt, encoder_tokens)[: plan.n]
            else:
                texts = (
                    tracer.expected_text(prompt, limit, salt, tracer.EOS, seed=index, encoder_tokens=encoder_tokens)
                    for index in range(plan.n)
                )
                found = [(text, len(text) < limit) for text in texts]
            self._right[plan.number] = found
        return found

    def may_never_fit(self, plan: RequestPlan) -> bool:
        """Whether a worker may refuse it for ever."""
        slots = self._num_first_tokens(plan) + self._most_tokens(plan) - 1
        settings = [worker.cache_settings() for worker in self.plans]
        if self.has_encoder and any(-(-len(plan.prompt) // BLOCK_SIZE) > one.encoder_capacity for one in settings):
            return True
        num_blocks = -(-slots // BLOCK_SIZE)
        if plan.num_beams > 1:
            num_shared = self._num_first_tokens(plan) // BLOCK_SIZE
            num_blocks = num_shared + plan.num_beams * (num_blocks - num_shared)
        if any(num_blocks > one.capacity for one in settings):
            return True
        # All beams need rings and running states.
        return plan.num_beams > 1 and any(
            group.num_for_beams(one.sizes, plan.num_beams) >= group.num_blocks
            for one in settings
            for group in one.groups
        )

    def _num_first_tokens(self, plan: RequestPlan) -> int:
        return 1 if self.has_encoder else len(plan.prompt)

    def _most_tokens(self, plan: RequestPlan) -> int:
        room = MAX_MODEL_LEN - self._num_first_tokens(plan)
        return min(plan.max_tokens or room, room)

    def ended(self, plan: RequestPlan, how: str) -> None:
        self._num_ended += 1
        self.counts[f"outcome: {how}"] += 1
        self.kernel.note(f"request {plan.number} {how}")
        self.kernel.trace("client", f"request {plan.number} ended: {how}")

    @property
    def manager(self) -> ManagerProcess | None:
        """The process that leads; without one the last that did."""
        return max(self.living_managers(), key=lambda process: process.core.epoch, default=self._last_leader)

    def living_managers(self) -> list[ManagerProcess]:
        """Those that have begun to lead, and have not ended: more than one if the old one does not know yet."""
        return [process for process in self._managers.values() if not process.is_dead and hasattr(process, "core")]

    def manager_processes(self) -> list[ManagerProcess]:
        """Those that have not ended, whether they lead or stand by."""
        return [process for process in self._managers.values() if not process.is_dead]

    def manager_channel(self, process: Process) -> Any:
        if len(self.manager_addresses) == 1:
            return Channel(self.bus, process, self.manager_addresses[0])
        return LeaderChannel(self.bus, process, self.manager_addresses)

    # -- lives and deaths

    def _start_manager(self, machine: str = MACHINES[0]) -> None:
        self._num_managers += 1
        self._managers[machine] = ManagerProcess(self, machine, self._num_managers, self.limits)
        self._managers[machine].boot()

    def on_leading(self, process: ManagerProcess) -> None:
        """It leads from now on. Others hear of it from its health, if they hear of it."""
        self.laws.on_leading(process)
        self._last_leader = process
        self.counts["managers that took over"] += bool(self.leader_lease)
        address = address_of(process.machine)
        for other in [*self.live_workers(), *self.clients] if self.leader_lease else ():
            self.bus.send(
                process, process.machine, other.machine, other.deliver, other.leaders.on_health, address, True
            )

    def on_manager_death(self, process: ManagerProcess) -> None:
        if self._is_over:
            return
        self._count_cases(process)
        if process.lost_power:
            self.counts[f"state file {self.disk.lose_power()}"] += 1
        seconds = self._draw.choice([0.05, 0.5, self._draw.uniform(0.5, 3.0)])
        self.kernel.after(seconds, self._start_manager, process.machine)

    def on_damaged_state(self, process: ManagerProcess) -> None:
        """Somebody puts back the state file as it was once."""
        self.counts["state file restored by hand"] += 1
        self.disk.restore(self._draw.choice(self.disk.backups[-3:]) if self.disk.backups else None)
        process.crash()

    def _count_cases(self, process: ManagerProcess) -> None:
        if hasattr(process, "core"):
            for case, count in process.core.reconciled.items():
                self.counts[f"reconciliation: {case.value}"] += count
            process.core.reconciled.clear()

    def _start_worker(self, machine: Machine) -> None:
        WorkerProcess(self, machine).boot()

    def start_rival(self, worker: WorkerProcess) -> bool:
        """A newer process of the same worker on another machine, which starts it again like any other. False if there is one."""
        name = f"{worker.plan.worker_id}b"
        if name in self.machines:
            return False
        self.machines[name] = machine = Machine(name, worker.plan, self.kernel)
        self._start_worker(machine)
        return True

    def on_worker_death(self, worker: WorkerProcess) -> None:
        """It is started again after a while. When all has healed, the operator stops the machine whose process is not taken."""
        if self._is_over:
            return
        same = [other for other in self.live_workers() if other.plan.worker_id == worker.plan.worker_id]
        # Without another one it was refused for the lease of one that died: a manager's slow clock may make that long.
        if self._is_healed and worker.was_refused and any(other is not worker for other in same):
            return
        seconds = self._draw.choice([0.05, 0.5, self._draw.uniform(0.5, 4.0)])
        self.kernel.after(seconds, self._start_worker, worker.host)

    # -- the run

    def run(self) -> Result:
        with patches.installed(self):
            try:
                self._begin()
                self._go_on()
                if self.violation is None:
                    self.laws.at_the_end()
                for process in self.manager_processes():
                    self._count_cases(process)
                for worker in self.live_workers():
                    worker.count_preemptions()
            finally:
                self._wind_up()
        result = Result(
            self.kernel.seed,
            self.kernel.digest(),
            self.violation,
            self.kernel.num_events,
            self.kernel.now,
            self.kernel.lines,
            self.counts,
        )
        self.__dict__.clear()
        return result

    def _begin(self) -> None:
        kernel, draw = self.kernel, self._draw
        for of_manager in self.manager_machines:
            self.bus.machines[address_of(of_manager)] = of_manager
        epoch = kernel.random("epoch").choice(FIRST_EPOCHS)
        if epoch:
            self.disk.restore(encode(epoch))
        for of_manager in self.manager_machines:
            self._start_manager(of_manager)
        for plan in self.plans:
            self.machines[plan.worker_id] = machine = Machine(plan.worker_id, plan, kernel)
            self._start_worker(machine)
        self.clients += [ClientProcess(self, name) for name in self.client_names]
        at = 0.5
        for request in self.requests:
            if draw.random() < 0.4:
                at = draw.uniform(0.5, ACTIVE_SECONDS)
            kernel.at(at, self._ask, request)
        for _ in range(22):
            self._plan_look("describe", draw.choice(["", "w0", "w1"]))
        for _ in range(6):
            self._plan_look("check", None)
        for _ in range(22):
            request = draw.choice(self.requests)
            self._plan_look("route", (request.tenant_salt, request.prompt))
        for _ in range(draw.choice([0, 1, 2])):
            self._plan_look("drain", (draw.choice(["w0", "w1", "w9"]), draw.choice([None, 0.0, 0.3])))
        faults = self.kernel.random("faults")
        for name in faults.choices(list(FAULTS), k=faults.randint(6, 10)):
            kernel.at(faults.uniform(1.0, ACTIVE_SECONDS), self._do_fault, name, faults)
        kernel.at(ACTIVE_SECONDS + 2.0, self._heal)
        self.strangers.begin()

    def _ask(self, plan: RequestPlan) -> None:
        self._draw.choice(self.live_clients()).ask(plan)

    def _plan_look(self, kind: str, argument: Any) -> None:
        self.kernel.at(self._draw.uniform(0.5, ACTIVE_SECONDS), self._look, kind, argument)

    def _look(self, kind: str, argument: Any) -> None:
        self._draw.choice(self.live_clients()).look(kind, argument)

    def _do_fault(self, name: str, faults: Any) -> None:
        self.kernel.trace("FAULT", name)
        for _ in range(20):
            try:
                FAULTS[name](self, faults)
                break
            except NotNow:
                name = faults.choice(list(FAULTS))
                self.kernel.trace("FAULT", f"not possible now; {name} instead")
        self.counts[f"fault: {name}"] += 1
        self.kernel.note(name)
        self.laws.all()

    def _heal(self) -> None:
        self.kernel.trace("FAULT", "everything heals")
        self.bus.heal_all()
        self.is_watching = False
        self._is_healed = True
        self.disk.lies = False
        self.disk.operations_left = None
        self.lease_server.delay_seconds = 0.0
        for process in self.processes:
            process.thaw()
        for worker in self.live_workers():
            worker.gpu.step_seconds = self.step_seconds
        self.strangers.on_healed()

    def _is_quiet(self) -> bool:
        if len(self.living_managers()) != 1 or not self.strangers.is_over():
            return False
        (core,) = self.living_managers()
        workers = self.live_workers()
        if len(workers) != len(self.plans) or any(worker.is_frozen for worker in workers):
            return False
        ours = [one for one in core.core.sessions if one.registration.model_fingerprint == FINGERPRINT]
        sessions = {session.number: session for session in ours if session.number not in core.core._recoveries}
        return all(
            worker.is_quiet and worker.cache.session in sessions and worker.cache.session for worker in workers
        ) and len(sessions) == len(workers)

    def _go_on(self) -> None:
        kernel = self.kernel
        last = ACTIVE_SECONDS + 2.0
        patience = self.laws.seconds_to_report() if self.strangers.kinds else 0.0
        end = last + 2 * TIMEOUT_SECONDS + patience
        quiet_at = last
        while self.violation is None:
            if not kernel.step():
                self.fail("all goes quiet", "nothing is going to happen any more")
            if kernel.num_events > MAX_EVENTS:
                self.fail("all goes quiet", f"{MAX_EVENTS} events are not enough")
            if kernel.now < quiet_at:
                continue
            quiet_at = kernel.now + 0.25
            self.laws.of_progress()
            # Some clients have vanished with their requests.
            num_lost = sum(client.num_begun - client.num_ended for client in self.clients if client.is_dead)
            if self._num_ended + num_lost < len(self.requests):
                if kernel.now > end:
                    self.fail("all goes quiet", f"{self._num_ended} of {len(self.requests)} requests have ended")
                continue
            end = min(end, kernel.now + _QUIET_SECONDS + patience)
            self.laws.count("all goes quiet")
            if self._is_quiet():
                return
            if kernel.now > end:
                self.fail("all goes quiet", self._why_not_quiet())

    def _why_not_quiet(self) -> str:
        core = self.manager
        sessions = [] if core is None or not hasattr(core, "core") else core.core.sessions
        workers = [
            f"{worker.name} session={worker.cache.session:#x} ready={worker.cache.is_ready()} idle={worker.cache.is_idle} "
            f"sequences={list(worker.cache.state.sequences.values())} waiting={worker.engine.scheduler.num_waiting}"
            for worker in self.live_workers()
        ]
        return f"after all requests have ended: {sessions}; {workers}"

    def _wind_up(self) -> None:
        """Nothing may be left to the garbage collector, which comes when it likes."""
        self._is_over = True
        self.bus.is_over = True
        for process in self.processes:
            process.loop.wind_up()
            process._inbox.clear()
        gc.collect(0)

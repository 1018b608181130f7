"""What can go wrong, and how each thing is done to a running world."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpool.cache_service.election.epoch import MAX_EPOCH, MAX_FOREIGN_EPOCH
from kvpool.cache_service.election.file import encode
from kvpool.cache_service.foreign_epochs import MAX_RAISE
from tests.simulation import lease_server
from tests.simulation.manager import LEASE_SECONDS
from tests.simulation.process import Process
from tests.simulation.rpc import Call

if TYPE_CHECKING:
    from tests.simulation.manager import ManagerProcess
    from tests.simulation.worker import WorkerProcess
    from tests.simulation.world import World

LARGEST = (1 << 64) - 1

Fault = Callable[["World", random.Random], None]
"""Does it. Raises NotNow."""


class NotNow(Exception):
    """There is nothing that the fault could be done to now."""


# -- to the network


def _machines(world: World) -> list[str]:
    return [*world.manager_machines, *sorted(world.machines), *world.client_names]


def _weather(world: World, draw: random.Random, **changes: float) -> None:
    weather = world.bus.weather

    def change(values: dict[str, float]) -> None:
        for name, value in values.items():
            setattr(weather, name, value)

    change(changes)
    world.kernel.trace("network", f"weather: {changes}")
    world.kernel.after(draw.uniform(1.0, 4.0), change, dict.fromkeys(changes, 0.0))


def _cut_one_way(world: World, draw: random.Random) -> None:
    source, target = draw.sample(_machines(world), 2)
    if draw.random() < 0.6:
        pair = [draw.choice(world.manager_machines), draw.choice(_machines(world)[len(world.manager_machines) :])]
        draw.shuffle(pair)
        source, target = pair
    world.bus.cut(source, target, draw.uniform(0.3, 2.5 * LEASE_SECONDS))


def _cut_off(world: World, draw: random.Random) -> None:
    """A machine is cut off from all others, and comes back link by link."""
    machines = _machines(world)
    one = draw.choice(machines)
    begin = draw.uniform(0.3, 2.5 * LEASE_SECONDS)
    for other in machines:
        for source, target in ((one, other), (other, one)):
            if source != target:
                world.bus.cut(source, target, begin + draw.uniform(0.0, 3.0))


# -- to processes


def _require(*possible: object) -> None:
    if not all(possible):
        raise NotNow


def _worker(world: World, draw: random.Random) -> WorkerProcess:
    alive = world.live_workers()
    _require(alive)
    return draw.choice(alive)


def _manager(world: World, draw: random.Random) -> ManagerProcess:
    """The one that leads, or now and then one that stands by."""
    leader, alive = world.manager, world.manager_processes()
    if leader is not None and not leader.is_dead and draw.random() < 0.8:
        return leader
    _require(alive)
    return draw.choice(alive)


def _crash(process: Process, draw: random.Random) -> None:
    if draw.random() < 0.5:
        process.loop.num_callbacks_left = draw.randrange(60)
    else:
        process.crash(lost_power=draw.random() < 0.5)


def _freeze(process: Process, seconds: float) -> None:
    _require(not process.is_dead, not process.is_frozen)
    process.freeze()
    process.kernel.after(seconds, process.thaw)


def _manager_freeze(world: World, draw: random.Random) -> None:
    seconds = draw.choice([draw.uniform(0.1, 1.0), draw.uniform(1.0, 3.0 * LEASE_SECONDS)])
    _freeze(_manager(world, draw), seconds)


def _slow_gpu(world: World, draw: random.Random) -> None:
    worker = _worker(world, draw)
    usual = worker.gpu.step_seconds
    worker.gpu.step_seconds = draw.choice([0.3, 1.0, 4.0])
    world.kernel.after(draw.uniform(1.0, 4.0), setattr, worker.gpu, "step_seconds", usual)


def _clock(world: World, draw: random.Random) -> None:
    processes: list[Process] = [*world.live_workers(), *world.clients, *world.manager_processes()]
    process = draw.choice(processes)
    jump = draw.choice([0.0, draw.uniform(0.0, 2.0), draw.uniform(0.0, 10.0)])
    process.change_clock(jump, draw.choice([0.5, 0.9, 1.1, 2.0]))
    world.kernel.trace(process.name, f"its clock jumps by {jump:.2f} s and drifts")


def _client_vanishes(world: World, draw: random.Random) -> None:
    alive = world.live_clients()
    _require(len(alive) >= 2)
    draw.choice(alive[1:]).crash(lost_power=draw.random() < 0.5)


def _rival(world: World, draw: random.Random) -> None:
    """Another process is started under the worker's name, elsewhere, while the first one still runs. Each is started again by its
    own supervisor, as a newer incarnation."""
    worker = _worker(world, draw)
    _require(not worker.is_leaving and world.start_rival(worker))


def _wall_clock(world: World, draw: random.Random) -> None:
    """A machine's wall clock is set back, and its worker crashes; its state folder is lost with it, or not."""
    worker = _worker(world, draw)
    worker.host.set_back(draw.choice([1.0, 60.0, 3600.0]))
    if draw.random() < 0.7:
        worker.host.lose_folder()
    worker.crash()


# -- to the state file


def _with_a_file(world: World) -> ManagerProcess:
    """The manager that lives, if its epoch is in a file."""
    process = world.manager
    if world.leader_lease or process is None or process.is_dead:
        raise NotNow
    return process


def _state_lies(world: World, draw: random.Random) -> None:
    """The disk says that the epoch is written, and it is not, when the power goes: the write is lost or torn."""
    process = _with_a_file(world)
    world.disk.lies = True
    process.crash(lost_power=True)  # the next life's epoch is written to a disk that lies

    def again() -> None:
        world.disk.lies = False
        if world.manager is not None:
            world.manager.crash(lost_power=True)

    world.kernel.after(draw.uniform(3.0, 6.0), again)


def _state_cut(world: World, draw: random.Random) -> None:
    """The power goes while the next epoch is being written."""
    process = _with_a_file(world)
    process.crash(lost_power=True)
    world.disk.operations_left = draw.randrange(9)  # of the next life's


def _state_restored(world: World, draw: random.Random) -> None:
    """The manager comes back with the state file of long ago, or of just now, or with none."""
    process = _with_a_file(world)
    _require(hasattr(process, "core"))
    process.crash()
    epoch = process.core.epoch
    lost = draw.choice([0, 1, 2, 3, MAX_RAISE - 9, MAX_RAISE + 9, epoch])
    world.disk.restore(encode(epoch - lost) if lost < epoch else None)
    world.kernel.trace("FAULT", f"the state file is that of {lost} epochs ago")


# -- to certain messages


def _crash_a_manager(world: World, draw: random.Random) -> None:
    """If there is one."""
    with contextlib.suppress(NotNow):
        _crash(_manager(world, draw), draw)


def _register_replies(world: World, draw: random.Random) -> None:
    """Sessions end, and the first answers to the registrations that follow are lost."""
    left = draw.randint(1, 4)

    def rule(kind: str, call: Call) -> bool:
        nonlocal left
        if not left or kind != "reply" or call.method != "Register":
            return False
        left -= 1
        world.counts["register reply lost"] += 1
        return True

    world.bus.rules.append(rule)
    _crash_a_manager(world, draw)


def _report_cut(world: World, draw: random.Random) -> None:
    """The manager comes back and hears a report; in its middle one of the two dies, or the link between them."""
    begin, what = draw.randint(1, 5), draw.randrange(4)

    def rule(kind: str, call: Call) -> bool:
        nonlocal begin
        if kind != "reply" or call.method != "Report":
            return False
        begin -= 1
        if begin:
            return False
        world.counts["report cut"] += 1
        process = call.server() if what == 0 else call.process
        if what <= 1 and process is not None:
            world.kernel.after(0.0, process.crash)
        elif what == 2:
            world.bus.cut(call.process.machine, call.target, 2.0 * LEASE_SECONDS)
        return True

    world.bus.rules.append(rule)
    _crash_a_manager(world, draw)


def _made_up(world: World, draw: random.Random) -> None:
    """Somebody registers under the name of a worker, with all that Describe shows and numbers that are made up."""
    worker, clients, manager = _worker(world, draw), world.live_clients(), world.manager
    if not clients or manager is None or not hasattr(manager, "core"):
        raise NotNow
    epoch = manager.core.epoch
    for number in range(draw.randint(1, 6)):
        request = worker.introduction()
        request.incarnation = draw.choice([worker.incarnation, worker.incarnation + 1, LARGEST])
        request.register_no = draw.choice([1, 50, LARGEST])
        request.process_key = draw.choice([b"", draw.randbytes(16)])
        request.predecessor_key = draw.choice([b"", draw.randbytes(16)])
        request.highest_epoch_seen = draw.choice([0, epoch, epoch + 1, epoch + MAX_RAISE, MAX_FOREIGN_EPOCH, MAX_EPOCH])
        request.holds_state = draw.random() < 0.5
        world.kernel.after(0.3 * number, draw.choice(clients).register, request)


# -- an attempt that is overtaken

_PAUSE_SECONDS = 3.0
"""A step takes so long while streams are to be still there when the manager comes back."""


def _overtaken(world: World, draw: random.Random) -> None:
    """A worker is cut off until one of its streams has gone on elsewhere; then it comes back, or the manager forgets all and
    both report, the older attempt last or first."""
    busy = [worker for worker in world.live_workers() if _sequences(worker)]
    _require(busy, not world.is_watching)
    worker = draw.choice(busy)
    others = [machine for machine in _machines(world) if machine != worker.machine]
    for other in others:
        world.bus.cut(worker.machine, other)
        world.bus.cut(other, worker.machine)
    worker.gpu.step_seconds = _PAUSE_SECONDS
    gives_up_at = world.kernel.now + 5 * LEASE_SECONDS
    world.is_watching = True

    def watch() -> None:
        newer = _newer_attempt(world, worker)
        if newer is None and world.is_watching and not worker.is_dead and world.kernel.now < gives_up_at:
            world.kernel.after(0.1, watch)
            return
        if newer is not None:
            newer.gpu.step_seconds = _PAUSE_SECONDS
            if draw.random() < 0.7:
                forget(newer)
        heal(0.0 if newer is None else draw.uniform(0.0, 1.0))

    def forget(newer: WorkerProcess) -> None:
        if draw.random() < 0.5:
            links = [(newer.machine, machine) for machine in world.manager_machines]
            for source, target in (*links, *((target, source) for source, target in links)):
                world.bus.cut(source, target, draw.uniform(3.0, 5.0))
        if world.manager is not None:
            world.manager.crash()

    def heal(seconds: float) -> None:
        world.is_watching = False
        for other in others:
            # The client, else it would end the stream that it has left.
            later = seconds if other in world.manager_machines else seconds + draw.uniform(4.0, 8.0)
            world.kernel.after(later, world.bus.heal, worker.machine, other)
            world.kernel.after(later, world.bus.heal, other, worker.machine)
        for slow in world.live_workers():
            world.kernel.after(_PAUSE_SECONDS + 3.0, setattr, slow.gpu, "step_seconds", world.step_seconds)

    watch()


def _sequences(worker: WorkerProcess) -> dict[str, int]:
    """The attempts that run or wait here, by sequence_id."""
    sequences = [sequence for sequence, _ in worker.live_blocks()]
    return {
        sequence.id.sequence_id: sequence.id.attempt for sequence in (*sequences, *worker.engine.scheduler.candidates())
    }


def _newer_attempt(world: World, worker: WorkerProcess) -> WorkerProcess | None:
    """Who holds blocks for a larger attempt of one of this worker's sequences."""
    here = _sequences(worker)
    for other in world.live_workers():
        for sequence, _ in other.live_blocks():
            if other is not worker and sequence.id.attempt > here.get(sequence.id.sequence_id, 1 << 30):
                return other
    return None


# -- to the Lease, where two managers have one


def _manager_told_to_stop(world: World, draw: random.Random) -> None:
    """One of two, as in a rollout."""
    process = _manager(world, draw)
    _require(not process.is_frozen, world.leader_lease)
    process.stop()


def _lease_slow(world: World, draw: random.Random) -> None:
    """The API server answers late, some requests after the time of their senders."""
    _require(world.leader_lease)
    server = world.lease_server
    server.delay_seconds = draw.choice([0.1, 0.5, world.leader_lease])
    world.kernel.after(draw.uniform(1.0, 3.0 * world.leader_lease), setattr, server, "delay_seconds", 0.0)


def _lease_away(world: World, draw: random.Random) -> None:
    """The API server is cut off from one manager or all, in one direction or both; workers are not cut off from these."""
    _require(world.leader_lease)
    machines = draw.choice([world.manager_machines, (draw.choice(world.manager_machines),)])
    both = draw.random() < 0.6
    seconds = draw.uniform(0.3, 3.0 * world.leader_lease)
    for machine in machines:
        links = [(machine, lease_server.MACHINE), (lease_server.MACHINE, machine)]
        for source, target in links if both else [draw.choice(links)]:
            world.bus.cut(source, target, seconds + draw.uniform(0.0, 1.0))


def _lease_deleted(world: World, draw: random.Random) -> None:
    _require(lease_server.LEASE in world.lease_server.leases)
    world.lease_server.is_deleted = True
    world.lease_server.delete(lease_server.LEASE)


def _lease_held_too_long(world: World, draw: random.Random) -> None:
    """The clock of the manager that leads is slow, or the other one's is fast: the next one leads before the last one has ended."""
    alive, leader = world.manager_processes(), world.manager
    _require(world.leader_lease, len(alive) >= 2, leader in alive)
    for process in alive:
        process.change_clock(0.0, draw.uniform(0.2, 0.5) if process is leader else draw.uniform(1.0, 2.0))
    if leader is not None and draw.random() < 0.7:
        world.bus.cut(leader.machine, lease_server.MACHINE, draw.uniform(1.0, 4.0 * world.leader_lease))


FAULTS: dict[str, Fault] = {
    "messages dropped": lambda world, draw: _weather(world, draw, drop=draw.choice([0.05, 0.15, 0.4])),
    "messages duplicated": lambda world, draw: _weather(world, draw, duplicate=draw.choice([0.1, 0.4])),
    "messages delayed": lambda world, draw: _weather(
        world, draw, delay=draw.choice([0.1, 0.3]), delay_seconds=draw.choice([0.5, 3.0, 8.0])
    ),
    "messages reordered": lambda world, draw: _weather(world, draw, reorder_seconds=draw.choice([0.05, 0.3])),
    "one-way partition": _cut_one_way,
    "partition healed link by link": _cut_off,
    "manager crash": lambda world, draw: _crash(_manager(world, draw), draw),
    "manager freeze": _manager_freeze,
    "state file lost or torn": _state_lies,
    "state file cut in the middle": _state_cut,
    "worker crash": lambda world, draw: _crash(_worker(world, draw), draw),
    "worker freeze, short": lambda world, draw: _freeze(_worker(world, draw), draw.uniform(0.1, 0.7 * LEASE_SECONDS)),
    "worker freeze, longer than its lease": lambda world, draw: _freeze(
        _worker(world, draw), draw.uniform(1.2, 3.0) * LEASE_SECONDS
    ),
    "slow GPU": _slow_gpu,
    "clock jump and drift": _clock,
    "register replies lost": _register_replies,
    "report cut half-way": _report_cut,
    "client vanishes": _client_vanishes,
    "rival incarnation": _rival,
    "wall clock set back": _wall_clock,
    "state file restored": _state_restored,
    "made-up Registers": _made_up,
    "attempt overtaken": _overtaken,
    "manager told to stop": _manager_told_to_stop,
    "lease slow": _lease_slow,
    "lease away": _lease_away,
    "lease deleted": _lease_deleted,
    "lease held too long": _lease_held_too_long,
}
"""By name, in the order in which seeds draw them."""

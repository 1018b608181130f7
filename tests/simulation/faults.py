"""What can go wrong, and how each thing is done to a running world."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpool.cache_service.election.epoch import MAX_EPOCH, MAX_FOREIGN_EPOCH
from kvpool.cache_service.election.file import encode
from kvpool.cache_service.foreign_epochs import MAX_RAISE
from tests.simulation import manager
from tests.simulation.manager import LEASE_SECONDS
from tests.simulation.process import Process
from tests.simulation.rpc import Call

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess
    from tests.simulation.world import World

LARGEST = (1 << 64) - 1

Fault = Callable[["World", random.Random], bool]
"""Does it; False if there is nothing that it could be done to now."""


def _worker(world: World, draw: random.Random) -> WorkerProcess | None:
    alive = world.live_workers()
    return draw.choice(alive) if alive else None


def _drop(world: World, draw: random.Random) -> bool:
    return _weather(world, draw, drop=draw.choice([0.05, 0.15, 0.4]))


def _duplicate(world: World, draw: random.Random) -> bool:
    return _weather(world, draw, duplicate=draw.choice([0.1, 0.4]))


def _delay(world: World, draw: random.Random) -> bool:
    return _weather(world, draw, delay=draw.choice([0.1, 0.3]), delay_seconds=draw.choice([0.5, 3.0, 8.0]))


def _reorder(world: World, draw: random.Random) -> bool:
    return _weather(world, draw, reorder_seconds=draw.choice([0.05, 0.3]))


def _weather(world: World, draw: random.Random, **changes: float) -> bool:
    weather = world.bus.weather
    for name, value in changes.items():
        setattr(weather, name, value)

    def end() -> None:
        for name in changes:
            setattr(weather, name, 0.0)

    world.kernel.trace("network", f"weather: {changes}")
    world.kernel.after(draw.uniform(1.0, 4.0), end)
    return True


def _machines(world: World) -> list[str]:
    return [manager.MACHINE, *sorted(world.machines), *world.client_names]


def _cut_one_way(world: World, draw: random.Random) -> bool:
    source, target = draw.sample(_machines(world), 2)
    if draw.random() < 0.6:
        pair = [manager.MACHINE, draw.choice(_machines(world)[1:])]
        draw.shuffle(pair)
        source, target = pair
    world.bus.cut(source, target)
    world.kernel.after(draw.uniform(0.3, 2.5 * LEASE_SECONDS), world.bus.heal, source, target)
    return True


def _cut_off(world: World, draw: random.Random) -> bool:
    """A machine is cut off from all others, and comes back link by link."""
    machines = _machines(world)
    one = draw.choice(machines)
    begin = draw.uniform(0.3, 2.5 * LEASE_SECONDS)
    for other in machines:
        for source, target in ((one, other), (other, one)):
            if source != target:
                world.bus.cut(source, target)
                world.kernel.after(begin + draw.uniform(0.0, 3.0), world.bus.heal, source, target)
    return True


def _manager_crash(world: World, draw: random.Random) -> bool:
    process = world.manager
    if process is None or process.is_dead:
        return False
    _crash(process, draw)
    return True


def _crash(process: Process, draw: random.Random) -> None:
    if draw.random() < 0.5:
        process.crash_soon(draw.randrange(60))
    else:
        process.crash(lost_power=draw.random() < 0.5)


def _state_lies(world: World, draw: random.Random) -> bool:
    """The disk says that the epoch is written, and it is not, when the power goes: the write is lost or torn."""
    process = world.manager
    if process is None or process.is_dead:
        return False
    world.disk.lies = True
    process.crash(lost_power=True)  # the next life's epoch is written to a disk that lies

    def again() -> None:
        world.disk.lies = False
        if world.manager is not None and not world.manager.is_dead:
            world.manager.crash(lost_power=True)

    world.kernel.after(draw.uniform(3.0, 6.0), again)
    return True


def _state_cut(world: World, draw: random.Random) -> bool:
    """The power goes while the next epoch is being written."""
    process = world.manager
    if process is None or process.is_dead:
        return False
    process.crash(lost_power=True)
    world.disk.operations_left = draw.randrange(9)  # of the next life's
    return True


def _freeze(process: Process | None, world: World, seconds: float) -> bool:
    if process is None or process.is_dead or process.is_frozen:
        return False
    process.freeze()
    world.kernel.after(seconds, process.thaw)
    return True


def _manager_freeze(world: World, draw: random.Random) -> bool:
    return _freeze(world.manager, world, draw.choice([draw.uniform(0.1, 1.0), draw.uniform(1.0, 3.0 * LEASE_SECONDS)]))


def _worker_crash(world: World, draw: random.Random) -> bool:
    worker = _worker(world, draw)
    if worker is None:
        return False
    _crash(worker, draw)
    return True


def _worker_freeze_short(world: World, draw: random.Random) -> bool:
    return _freeze(_worker(world, draw), world, draw.uniform(0.1, 0.7 * LEASE_SECONDS))


def _worker_freeze_long(world: World, draw: random.Random) -> bool:
    return _freeze(_worker(world, draw), world, draw.uniform(1.2, 3.0) * LEASE_SECONDS)


def _slow_gpu(world: World, draw: random.Random) -> bool:
    worker = _worker(world, draw)
    if worker is None:
        return False
    usual = worker.gpu.step_seconds
    worker.gpu.step_seconds = draw.choice([0.3, 1.0, 4.0])

    def end() -> None:
        worker.gpu.step_seconds = usual

    world.kernel.after(draw.uniform(1.0, 4.0), end)
    return True


def _clock(world: World, draw: random.Random) -> bool:
    processes: list[Process] = [*world.live_workers(), *world.clients]
    if world.manager is not None:
        processes.append(world.manager)
    process = draw.choice(processes)
    jump = draw.choice([0.0, draw.uniform(0.0, 2.0), draw.uniform(0.0, 10.0)])
    process.change_clock(jump, draw.choice([0.5, 0.9, 1.1, 2.0]))
    world.kernel.trace(process.name, f"its clock jumps by {jump:.2f} s and drifts")
    return True


def _register_replies(world: World, draw: random.Random) -> bool:
    """Sessions end, and the first answers to the registrations that follow are lost."""
    left = draw.randint(1, 4)

    def rule(kind: str, call: Call) -> bool:
        nonlocal left
        if left and kind == "reply" and call.method == "Register":
            left -= 1
            world.bus.num_faults["register reply lost"] += 1
            return True
        return False

    world.bus.rules.append(rule)
    return _manager_crash(world, draw) or True


def _report_cut(world: World, draw: random.Random) -> bool:
    """The manager comes back and hears a report; in its middle one of the two dies, or the link between them."""
    begin, what, is_done = draw.randint(1, 5), draw.randrange(4), False

    def rule(kind: str, call: Call) -> bool:
        nonlocal begin, is_done
        if is_done or kind != "reply" or call.method != "Report":
            return False
        begin -= 1
        if begin:
            return False
        is_done = True
        world.bus.num_faults["report cut"] += 1
        process = call.server() if what == 0 else call.process
        if what <= 1 and process is not None:
            world.kernel.after(0.0, process.crash)
        elif what == 2:
            world.bus.cut(call.process.machine, manager.MACHINE)
            world.kernel.after(2.0 * LEASE_SECONDS, world.bus.heal, call.process.machine, manager.MACHINE)
        return True

    world.bus.rules.append(rule)
    return _manager_crash(world, draw) or True


def _client_vanishes(world: World, draw: random.Random) -> bool:
    alive = [client for client in world.clients if not client.is_dead]
    if len(alive) < 2:
        return False
    draw.choice(alive[1:]).crash(lost_power=draw.random() < 0.5)
    return True


def _rival(world: World, draw: random.Random) -> bool:
    """Another process is started under the worker's name, elsewhere, while the first one still runs. Each is started again by its
    own supervisor, as a newer incarnation."""
    worker = _worker(world, draw)
    return worker is not None and not worker.is_leaving and world.start_rival(worker)


def _wall_clock(world: World, draw: random.Random) -> bool:
    """A machine's wall clock is set back, and its worker crashes; its state folder is lost with it, or not."""
    worker = _worker(world, draw)
    if worker is None:
        return False
    worker.host.set_back(draw.choice([1.0, 60.0, 3600.0]))
    if draw.random() < 0.7:
        worker.host.lose_folder()
    worker.crash()
    return True


def _state_restored(world: World, draw: random.Random) -> bool:
    """The manager comes back with the state file of long ago, or of just now, or with none."""
    process = world.manager
    if process is None or process.is_dead or not hasattr(process, "core"):
        return False
    process.crash()
    epoch = process.core.epoch
    lost = draw.choice([0, 1, 2, 3, MAX_RAISE - 9, MAX_RAISE + 9, epoch])
    world.disk.restore(encode(epoch - lost) if lost < epoch else None)
    world.kernel.trace("FAULT", f"the state file is that of {lost} epochs ago")
    return True


def _made_up(world: World, draw: random.Random) -> bool:
    """Somebody registers under the name of a worker, with all that Describe shows and numbers that are made up."""
    worker = _worker(world, draw)
    clients = [client for client in world.clients if not client.is_dead]
    if worker is None or not clients or world.manager is None or not hasattr(world.manager, "core"):
        return False
    epoch = world.manager.core.epoch
    for number in range(draw.randint(1, 6)):
        request = worker.introduction()
        request.incarnation = draw.choice([worker.incarnation, worker.incarnation + 1, LARGEST])
        request.register_no = draw.choice([1, 50, LARGEST])
        request.process_key = draw.choice([b"", draw.randbytes(16)])
        request.predecessor_key = draw.choice([b"", draw.randbytes(16)])
        request.highest_epoch_seen = draw.choice([0, epoch, epoch + 1, epoch + MAX_RAISE, MAX_FOREIGN_EPOCH, MAX_EPOCH])
        request.holds_state = draw.random() < 0.5
        world.kernel.after(0.3 * number, draw.choice(clients).register, request)
    return True


def _overtaken(world: World, draw: random.Random) -> bool:
    """A worker is cut off until one of its streams has gone on elsewhere; then it comes back, or the manager forgets all and
    both report, the older attempt last or first."""
    busy = [worker for worker in world.live_workers() if _sequences(worker)]
    if not busy or world.is_watching:
        return False
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
            for source, target in ((newer.machine, manager.MACHINE), (manager.MACHINE, newer.machine)):
                world.bus.cut(source, target)
                world.kernel.after(draw.uniform(3.0, 5.0), world.bus.heal, source, target)
        if world.manager is not None:
            world.manager.crash()

    def heal(seconds: float) -> None:
        world.is_watching = False
        for other in others:
            # The client, else it would end the stream that it has left.
            later = seconds if other == manager.MACHINE else seconds + draw.uniform(4.0, 8.0)
            world.kernel.after(later, world.bus.heal, worker.machine, other)
            world.kernel.after(later, world.bus.heal, other, worker.machine)
        for slow in world.live_workers():
            world.kernel.after(_PAUSE_SECONDS + 3.0, setattr, slow.gpu, "step_seconds", world.step_seconds)

    watch()
    return True


_PAUSE_SECONDS = 3.0
"""A step takes so long while streams are to be still there when the manager comes back."""


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


FAULTS: dict[str, Fault] = {
    "messages dropped": _drop,
    "messages duplicated": _duplicate,
    "messages delayed": _delay,
    "messages reordered": _reorder,
    "one-way partition": _cut_one_way,
    "partition healed link by link": _cut_off,
    "manager crash": _manager_crash,
    "manager freeze": _manager_freeze,
    "state file lost or torn": _state_lies,
    "state file cut in the middle": _state_cut,
    "worker crash": _worker_crash,
    "worker freeze, short": _worker_freeze_short,
    "worker freeze, longer than its lease": _worker_freeze_long,
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
}

"""The network: links between machines, each with its own weather, in each direction its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.rpc import Call
    from tests.simulation.stream_call import StreamCall
    from tests.simulation.world import World

from tests.simulation.process import POWER_LOSS_SECONDS


class Weather:
    """How bad the network is at present; one for all links."""

    def __init__(self) -> None:
        self.drop = 0.0
        self.duplicate = 0.0
        self.delay = 0.0
        """Of being late by up to `delay_seconds`."""
        self.delay_seconds = 0.0
        self.reorder_seconds = 0.0
        """Each message takes up to so much longer."""


class _Link:
    def __init__(self) -> None:
        self.num_cuts = 0
        """It is cut by so many partitions at once."""
        self.held: list[tuple[StreamCall | None, Process, Callable[..., None], tuple[Any, ...]]] = []
        """What comes through when it heals."""


class Bus:
    """Carries messages between processes. `endpoints`: who listens at which address."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kernel = world.kernel
        self.endpoints: dict[str, Process] = {}
        self.machines: dict[str, str] = {}
        """Of addresses."""
        self.weather = Weather()
        self.is_over = False
        """The run has ended: whatever is still called fails at once."""
        self.rules: list[Callable[[str, Call], bool]] = []
        """Asked for ("request" or "reply", call) of each short call; True: this one is lost."""
        self.open_calls: dict[Call, Process | None] = {}
        """Unanswered ones and the process that serves them."""
        self._links: dict[tuple[str, str], _Link] = {}
        self._random = world.kernel.random("bus")
        self.base_seconds = self._random.choice([0.0005, 0.002, 0.01])

    # -- links

    def link(self, source: str, target: str) -> _Link:
        found = self._links.get((source, target))
        if found is None:
            found = self._links[source, target] = _Link()
        return found

    def cut(self, source: str, target: str, seconds: float | None = None) -> None:
        """Nothing comes through in this direction until it heals: after so many seconds, or when it is told to."""
        self.link(source, target).num_cuts += 1
        self.kernel.trace("network", f"{source} → {target} is cut")
        if seconds is not None:
            self.kernel.after(seconds, self.heal, source, target)

    def heal(self, source: str, target: str) -> None:
        """The direction works again; what was on its way may arrive now."""
        link = self.link(source, target)
        link.num_cuts = max(0, link.num_cuts - 1)
        if link.num_cuts:
            return
        self.kernel.trace("network", f"{source} → {target} works again; {len(link.held)} messages come late")
        held, link.held = link.held, []
        for stream, sender, callback, args in held:
            if stream is not None:
                self._in_order(stream, sender, target, self._delay(), callback, args)
            else:
                self.world.counts["late"] += 1
                self.kernel.after(self._delay(), self._arrive, sender, self.kernel.now, callback, args)

    def heal_all(self) -> None:
        """Good weather and no cuts from now on."""
        self.weather = Weather()
        self.rules.clear()
        for source, target in list(self._links):
            self._links[source, target].num_cuts = min(1, self._links[source, target].num_cuts)
            if self._links[source, target].num_cuts:
                self.heal(source, target)

    # -- messages

    def _delay(self) -> float:
        weather, draw = self.weather, self._random
        seconds = self.base_seconds * (0.5 + draw.random())
        if weather.reorder_seconds:
            self.world.counts["reordered"] += 1
            seconds += draw.random() * weather.reorder_seconds
        if weather.delay and draw.random() < weather.delay:
            self.world.counts["delayed"] += 1
            seconds += draw.random() * weather.delay_seconds
        return seconds

    def send(self, sender: Process, source: str, target: str, callback: Callable[..., None], *args: Any) -> bool:
        """One message, by itself: it may be lost or late. False if it was lost for certain."""
        link = self.link(source, target)
        if link.num_cuts:
            if self._random.random() < 0.5:
                link.held.append((None, sender, callback, args))
                return True
            self.world.counts["cut off"] += 1
            return False
        if self.weather.drop and self._random.random() < self.weather.drop:
            self.world.counts["dropped"] += 1
            return False
        self.kernel.after(self._delay(), self._arrive, sender, self.kernel.now, callback, args)
        return True

    def repeats(self) -> float | None:
        """If the message just sent is delivered a second time: how much later."""
        if self.weather.duplicate and self._random.random() < self.weather.duplicate:
            self.world.counts["duplicated"] += 1
            return self._random.expovariate(2.0)
        return None

    def send_in_order(
        self, stream: StreamCall, sender: Process, source: str, target: str, callback: Callable[..., None], *args: Any
    ) -> None:
        """A message of an open connection: what is lost is sent again, and nothing overtakes an earlier one of its direction."""
        if stream.is_broken:
            return
        link = self.link(source, target)
        if link.num_cuts:
            link.held.append((stream, sender, callback, args))
            return
        delay = self._delay()
        if self.weather.drop and self._random.random() < self.weather.drop:
            self.world.counts["dropped"] += 1
            delay += 0.2
            if self._random.random() < 0.2:
                self.world.counts["connection broken"] += 1
                stream.break_off(self.kernel)
                return
        self._in_order(stream, sender, target, delay, callback, args)

    def _in_order(
        self,
        stream: StreamCall,
        sender: Process,
        target: str,
        delay: float,
        callback: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        when = max(stream.last_arrival.get(target, 0.0) + 1e-6, self.kernel.now + delay)
        stream.last_arrival[target] = when
        self.kernel.at(when, self._arrive, sender, self.kernel.now, callback, args)

    def _arrive(self, sender: Process, sent_at: float, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        if sender.is_dead and sender.lost_power and sent_at > sender.died_at - POWER_LOSS_SECONDS:
            return
        callback(*args)

    def on_death(self, process: Process) -> None:
        """A process has ended: its peers hear of it, unless its machine is gone or cut off."""
        for address, at in list(self.endpoints.items()):
            if at is process:
                del self.endpoints[address]
        for call in [call for call, server in self.open_calls.items() if server is process or call.process is process]:
            if process.lost_power:
                call.on_power_loss(process)
            else:
                call.on_peer_death(process)

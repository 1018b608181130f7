"""A machine that runs a worker: its wall clock, the worker's state folder, and who starts the worker again when it has died."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvpool.worker_service.incarnation import Identity, next_identity

if TYPE_CHECKING:
    from tests.simulation.kernel import Kernel
    from tests.simulation.worker import WorkerPlan

_EPOCH_SECONDS = 1_000_000.0
"""What wall clocks show at the beginning; clocks that are set back do not come to 0."""


class Machine:
    """Runs one process of its worker at a time. What is here outlives them."""

    def __init__(self, name: str, plan: WorkerPlan, kernel: Kernel) -> None:
        self.name = name
        self.plan = plan
        self.num_processes = 0
        self._kernel = kernel
        self._random: random.Random = kernel.random(f"machine {name}")
        self._ahead = self._random.uniform(0.0, 30.0)
        self._last: tuple[int, bytes] | None = None

    def begin_process(self) -> Identity:
        """As worker_service/incarnation.py does at the start; the process before has ended, as the lock on the folder proves."""
        self.num_processes += 1
        wall = _EPOCH_SECONDS + self._ahead + self._kernel.now
        identity = next_identity(self._last, int(wall * 1e9))
        # Drawn from the seed, where the worker draws from the system.
        identity = identity._replace(process_key=self._random.randbytes(16))
        self._last = identity.incarnation, identity.process_key
        return identity

    def set_back(self, seconds: float) -> None:
        self._ahead -= seconds
        self._kernel.trace(self.name, f"its wall clock is set back by {seconds:.1f} s")

    def lose_folder(self) -> None:
        """The state folder is lost, as that of a container without a volume."""
        self._last = None
        self._kernel.trace(self.name, "the state folder is lost")

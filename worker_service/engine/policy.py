"""What puts one request before another."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import GenerationParams


class SchedulingPolicy(StrEnum):
    """What puts one request before another.

    * fcfs: all requests are of one level; `GenerationParams.priority` is not looked at. No accepted request starves.
    * priority: the level is the request's priority, smaller first. Strict between levels: while a request of a better level can be
      asked for or computed, nothing of a worse one is, so a worse level may starve. Within a level nobody does. Who runs is not
      displaced by a better one that waits, only by the pool running out.

    Within a level, tenants share fairly (`fairness.py`), and each tenant's requests come in the order of their arrival.
    """

    fcfs = "fcfs"
    priority = "priority"

    def level(self, params: GenerationParams) -> int:
        """Smaller is better."""
        return params.priority if self is SchedulingPolicy.priority else 0

"""The order of requests: scheduling policies."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import GenerationParams


class SchedulingPolicy(StrEnum):
    """How requests are ordered.

    * fcfs: all requests are of one level; `GenerationParams.priority` is ignored. No accepted request starves.
    * priority: the level is the request's priority, smaller first. Strict between levels: nothing of a level is allocated or
      computed while a request of a better one can be, so a worse level may starve. Within a level no request starves. A running
      request is preempted only if the pool runs out, not for a better one that waits.

    Within a level, tenants share fairly (`fairness.py`), and each tenant's requests come in the order of their arrival.
    """

    fcfs = "fcfs"
    priority = "priority"

    def level(self, params: GenerationParams) -> int:
        """Smaller is better."""
        return params.priority if self is SchedulingPolicy.priority else 0

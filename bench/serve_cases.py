"""The workloads of `make bench KIND=serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpool.load.arrivals import ClosedLoop
from kvpool.load.plan import CacheCase, LoadPlan
from kvpool.load.workload import DEFAULT_SIZES, LoadWorkload, RequestSizes

COLD_AND_WARM: Final = (CacheCase.COLD, CacheCase.WARM)

PLANS: Final[Mapping[str, LoadPlan]] = {
    "shared": LoadPlan(
        LoadWorkload.SHARED, ClosedLoop(16), 16, DEFAULT_SIZES[LoadWorkload.SHARED], cases=COLD_AND_WARM
    ),
    "unshared": LoadPlan(LoadWorkload.UNSHARED, ClosedLoop(16), 16, DEFAULT_SIZES[LoadWorkload.UNSHARED]),
    "document": LoadPlan(
        LoadWorkload.DOCUMENT, ClosedLoop(8), 8, DEFAULT_SIZES[LoadWorkload.DOCUMENT], cases=COLD_AND_WARM
    ),
    "chats": LoadPlan(LoadWorkload.CHATS, ClosedLoop(8), 8, DEFAULT_SIZES[LoadWorkload.CHATS]),
    "long-shared": LoadPlan(
        LoadWorkload.SHARED, ClosedLoop(64), 64, RequestSizes(prefix_tokens=2_000, own_tokens=32, generated_tokens=64)
    ),
    "one": LoadPlan(
        LoadWorkload.UNSHARED, ClosedLoop(1), 1, RequestSizes(prefix_tokens=0, own_tokens=64, generated_tokens=128)
    ),
}
"""By name. All are closed loops in which all users start at once; `one` is a single stream."""
MIXED: Final = LoadPlan(LoadWorkload.MIXED, ClosedLoop(16), 64, DEFAULT_SIZES[LoadWorkload.MIXED])
"""For KV waste; only for kvpool's cluster."""


def sizes_of(plan: LoadPlan) -> str:
    """A description of a run's requests."""
    sizes = plan.sizes
    turns = f" x {sizes.turns} turns" if sizes.turns > 1 else ""
    return (
        f"{plan.num_conversations}{turns} of {sizes.prefix_tokens} shared + {sizes.own_tokens} own + "
        f"{sizes.generated_tokens} generated tokens"
    )


def unshared_tokens(plan: LoadPlan) -> int:
    """Tokens of all conversations of a run at their end, without any sharing."""
    sizes = plan.sizes
    return plan.num_conversations * (sizes.prefix_tokens + sizes.turns * (sizes.own_tokens + sizes.generated_tokens))

"""Makes and removes placement groups of Ray, in which processes may run. Each worker has one, and all managers share one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

Resources = dict[str, float]
_LOOK_SECONDS: Final = 1.0


def make_place(name: str, bundles: Sequence[Resources], strategy: str = "SPREAD") -> PlacementGroup:
    """Return the placement group of this name; make it if there is none. Ray chooses a node for each bundle: one with room, and
    with a large part of it free."""
    needed = [{kind: amount for kind, amount in bundle.items() if amount} for bundle in bundles]
    return _find(name) or placement_group(needed, strategy=strategy, name=name, lifetime="detached")


def remove_place(name: str) -> None:
    """Give the resources of a placement group back to Ray. Its actors must have been removed: Ray would wait for ever to restart
    them."""
    if (group := _find(name)) is not None:
        remove_placement_group(group)


def places() -> set[str]:
    """Return the names of all placement groups, those of other namespaces included."""
    return {entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"}


def waits_for_room(name: str) -> bool:
    """Whether a bundle of this group waits because no node has room for it."""
    group = _find(name)
    return group is not None and placement_group_table(group)["state"] in ("PENDING", "RESCHEDULING")


def wait_for_room(group: PlacementGroup, what: str, on_progress: Callable[[str], None]) -> None:
    """Wait until all bundles of a group have nodes."""
    while not group.wait(timeout_seconds=_LOOK_SECONDS):
        on_progress(f"waiting for room {what}: the nodes have {free_resources()} left")


def free_resources() -> str:
    """Return the free resources of all nodes together, as text for people."""
    free = ray.available_resources()
    return " and ".join(f"{free.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU") if free.get(kind) or kind == "CPU")


def _find(name: str) -> PlacementGroup | None:
    with contextlib.suppress(ValueError):
        group = get_placement_group(name)
        if placement_group_table(group)["state"] != "REMOVED":
            return group
    return None

"""Where processes may run: placement groups of Ray, in the namespace of this command. Each worker has one, and all managers share
one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

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
    """The placement group of this name. One that is there already, of a command that was killed, is used if it has the same
    bundles, else replaced. Ray chooses a node for each bundle: of those with room, one with a large part of it free."""
    wanted = [{kind: amount for kind, amount in bundle.items() if amount} for bundle in bundles]
    found = _find(name)
    if found is not None:
        if list(_entry(found)["bundles"].values()) == wanted:
            return found
        remove_placement_group(found)
    return placement_group(wanted, strategy=strategy, name=name, lifetime="detached")


def remove_place(name: str) -> None:
    """Give back what Ray has reserved. The actors in it must have been removed: Ray would wait for ever to start them again."""
    if (group := _find(name)) is not None:
        remove_placement_group(group)


def places() -> set[str]:
    """Names of all that are there, those of other namespaces too."""
    return {entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"}


def waits_for_room(name: str) -> bool:
    """Whether no node has room for a bundle of this group."""
    group = _find(name)
    return group is not None and _entry(group)["state"] in ("PENDING", "RESCHEDULING")


def wait_for_room(group: PlacementGroup, what: str, on_progress: Callable[[str], None]) -> None:
    """Wait until there are nodes for all bundles of a group."""
    while not group.wait(timeout_seconds=_LOOK_SECONDS):
        on_progress(f"waiting for room {what}: the nodes have {free_resources()} left")


def free_resources() -> str:
    """Of all nodes together, as people write it."""
    found = ray.available_resources()
    return " and ".join(f"{found.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU") if found.get(kind) or kind == "CPU")


def _find(name: str) -> PlacementGroup | None:
    with contextlib.suppress(ValueError):
        group = get_placement_group(name)
        if _entry(group)["state"] != "REMOVED":
            return group
    return None


def _entry(group: PlacementGroup) -> dict[str, Any]:
    """What Ray has noted of it."""
    found: dict[str, Any] = placement_group_table(group)
    return found

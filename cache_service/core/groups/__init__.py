"""The kinds of groups: a new one is a module here, and a line in KINDS."""

from __future__ import annotations

from array import array

from ..budget import Account
from ..messages import GroupSpec, Registration
from ..prefix_tree import PrefixTree
from .dense import DenseSessionGroup, DenseSpec
from .group import SessionGroup
from .state import StateSessionGroup, StateSpec
from .unit import UnitSessionGroup, UnitSpec
from .window import WindowSessionGroup, WindowSpec

KINDS: dict[type[GroupSpec], type[SessionGroup]] = {
    DenseSpec: DenseSessionGroup,
    WindowSpec: WindowSessionGroup,
    StateSpec: StateSessionGroup,
    UnitSpec: UnitSessionGroup,
}
"""The class of the groups that a worker introduces so."""


def make_groups(
    registration: Registration, tree: PrefixTree, account: Account, evicted: array[int] | None = None
) -> tuple[SessionGroup, ...]:
    """The groups of a new session, with their pools, under a new holder. `evicted`: where block hashes of what is evicted go."""
    size, specs = registration.layout
    kinds = [KINDS[type(spec)] for spec in specs]
    whole = tuple(slot for slot, kind in enumerate(kinds) if kind.is_whole)
    dependent = tuple(slot for slot, kind in enumerate(kinds) if kind.is_dependent)
    holder = tree.new_holder(len(specs), whole, dependent)
    groups = []
    for slot, (kind, spec) in enumerate(zip(kinds, specs, strict=True)):
        # Look-ups pass a node if the whole groups have it, so their evictions say what was lost.
        names = evicted if slot in (whole or dependent) else None
        pool = kind.pool_type(spec.num_blocks, tree, holder, slot, account, names)
        groups.append(kind(spec, pool, size))
    holder.pools = tuple(group.pool for group in groups)
    return tuple(groups)

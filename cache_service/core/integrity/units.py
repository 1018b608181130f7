"""The law of units: the KV of an encoder's input is whole or not at all."""

from __future__ import annotations

from ..block_pool import State
from ..prefix_tree import RootNode
from ..session import Sequence
from ..unit_pool import UnitPool
from .findings import Findings
from .world import World

LAW = "unit"


def check_units(root: RootNode, world: World, findings: Findings) -> None:
    """Each unit of a root is in distinct blocks that hold it, all in the same state, of as many sequences."""
    for holder, blocks in root.units.items():
        session = world.session_of(holder)
        if session is None or session.unit_pool is None:
            findings.add(LAW, f"{root!r} has a unit in a pool of no session")
            continue
        if holder.retired:
            continue  # a sweep has perhaps come to some of its blocks
        pool = session.unit_pool
        if not blocks or len(set(blocks)) < len(blocks):
            findings.add(LAW, f"{root!r} has the unit {list(blocks)}", session, -1, group=pool.slot)
        looks = [(pool.state(block), pool.ref_count(block)) for block in blocks]
        for block, (state, ref_count) in zip(blocks, looks, strict=True):
            if pool.node(block) is not root:
                message = f"block {block} of a unit does not hold the input of its root"
                findings.add(LAW, message, session, block, group=pool.slot)
            elif (state, ref_count) != looks[0]:
                message = (
                    f"block {block} of a unit is {state.name.lower()} with ref_count {ref_count}, its first block {blocks[0]} is "
                    f"{looks[0][0].name.lower()} with {looks[0][1]}"
                )
                findings.add(LAW, message, session, block, group=pool.slot)
        is_cached = bool(looks) and looks[0][0] is State.CACHED
        if is_cached != pool.may_evict(root):
            message = f"a unit is {'' if is_cached else 'not '}cached, and the order of eviction says otherwise"
            findings.add(LAW, message, session, blocks[0] if blocks else -1, group=pool.slot)


def check_listed(pool: UnitPool, root: RootNode) -> str | None:
    """What is wrong with a root that is in the order of eviction, in words; None: nothing, or it has left it."""
    if pool.may_evict(root) and not pool.unit(root):
        return f"{root!r} is in the order of eviction and has no unit"
    return None


def check_block(pool: UnitPool, block: int, state: State, root: object) -> str | None:
    """What is wrong with a sealed block of a group with cross attention, in words; None: nothing."""
    if state in (State.FREE, State.RESERVED):
        return f"block {block} is {state.name.lower()} and still part of a unit"
    if not isinstance(root, RootNode) or block not in root.units.get(pool.holder, ()):
        return f"block {block} holds part of a unit that its root does not know"
    return None


def check_table(sequence: Sequence, findings: Findings) -> None:
    """A sequence's table in the group with cross attention is the unit of its root, or all of it is its own and its forks'."""
    session = sequence.session
    pool = session.unit_pool
    assert pool is not None
    table = sequence.tables[pool.slot]
    unit = pool.unit(sequence.root)
    if not table:
        findings.add(LAW, "a sequence has no unit", session, -1, sequence, pool.slot)
    is_sealed = bool(table) and pool.node(table[0]) is not None
    if is_sealed and (tuple(table) != unit or not sequence.encoder_computed):
        message = f"the table {table} is not the unit of the sequence's root, {list(unit)}, or not known to be computed"
        findings.add(LAW, message, session, table[0], sequence, pool.slot)
    num_holders = pool.ref_count(table[0]) if table and sequence.encoder_computed else 1
    for block in table:
        if not 0 < block < pool.num_blocks:
            findings.add("null block", f"a unit names block {block}", session, block, sequence, pool.slot)
        elif (pool.node(block) is not None) != is_sealed or pool.ref_count(block) != num_holders:
            message = (
                f"block {block} of a unit is not as its first block {table[0]}, or others have it before it is computed"
            )
            findings.add(LAW, message, session, block, sequence, pool.slot)
    if sequence.num_computed_tokens > sequence.num_cached_tokens and not sequence.encoder_computed:
        findings.add(LAW, "tokens are computed without the encoder's output", session, -1, sequence, pool.slot)
    if sequence.root.is_led_by(sequence) == sequence.encoder_computed:
        findings.add(LAW, "the root and the sequence disagree who computes the unit", session, -1, sequence, pool.slot)

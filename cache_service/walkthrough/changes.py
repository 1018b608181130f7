"""What one step changed, block by block."""

from __future__ import annotations

from ..core.block_pool import State
from .snapshot import BlockView, Snapshot


def changed_blocks(before: Snapshot, after: Snapshot) -> dict[int, str]:
    """How each block that is not as it was has changed, in words."""
    return {
        new.block: _difference(old, new)
        for old, new in zip(before.blocks, after.blocks, strict=True)
        if _aspects(old) != _aspects(new)
    }


def _aspects(block: BlockView) -> tuple[State, int, int, bool, tuple[str, ...]]:
    return block.state, block.ref_count, block.generation, block.sealed, block.words


def _difference(old: BlockView, new: BlockView) -> str:
    parts = []
    granted_again = old.generation != new.generation
    if old.sealed and granted_again:
        parts.append("evicted")
    if not old.sealed and new.sealed:
        parts.append("sealed")
    if old.state is not new.state:
        name = f"{old.state.name.lower()} → {new.state.name.lower()}"
        is_hit = old.state is State.CACHED and new.state is State.HELD and not granted_again
        parts.append(f"hit, {name}" if is_hit else name)
    elif old.ref_count != new.ref_count:
        parts.append(f"ref_count {old.ref_count} → {new.ref_count}")
    return ", ".join(parts) or ("granted again" if granted_again else "more words")

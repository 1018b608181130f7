"""Describes the changes of one step in a group, block by block."""

from __future__ import annotations

from .snapshot import BlockView, GroupView


def changed_blocks(before: GroupView, after: GroupView) -> dict[int, str]:
    """Return the changed blocks, each with its change in words."""
    pairs = zip(before.blocks, after.blocks, strict=True)
    return {new.block: _difference(old, new) for old, new in pairs if old != new}


def _difference(old: BlockView, new: BlockView) -> str:
    parts = []
    granted_again = old.generation != new.generation
    if old.sealed and granted_again:
        parts.append("evicted")
    if old.sealed and not new.sealed and not granted_again:
        parts.append("emptied")
    if not old.sealed and new.sealed:
        parts.append("sealed")
    if old.role != new.role:
        is_hit = old.state == "cached" and new.state == "held" and not granted_again
        parts.append(f"{'hit, ' if is_hit else ''}{old.role} → {new.role}")
    elif old.ref_count != new.ref_count:
        parts.append(f"ref_count {old.ref_count} → {new.ref_count}")
    return ", ".join(parts) or ("granted again" if granted_again else "more words")

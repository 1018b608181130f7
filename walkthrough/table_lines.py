"""Draws the tables of the live sequences in one group, and its free list."""

from __future__ import annotations

from rich.text import Text

from kvpool.cache_service.core.block_pool import State

from .layouts import Kind, kind_of
from .lines import EMPTY_SLOT, flow, marked
from .snapshot import BlockView, EntryView, GroupView, TableView


def draw_tables(before: GroupView, after: GroupView, block_size: int, width: int) -> list[Text]:
    """Draw one or more lines for each live sequence."""
    if not after.tables:
        return flow("Tables", [Text("no live sequence", style="dim")], width)
    lines = []
    earlier = {table.sequence_id: table for table in before.tables}
    for table in after.tables:
        old = earlier.get(table.sequence_id, table._replace(entries=(), scratch=()))
        items = [_entry(entry, after, block_size, is_new=entry not in old.entries) for entry in table.entries]
        kind = kind_of(after.group)
        if kind is Kind.FULL:
            items.append(Text(_tokens(table), style="dim"))
        else:
            items += _unnamed(old, table)
        lines += flow(f"{kind.value} {table.sequence_id}", items, width, gap=2)
    return lines


def _unnamed(old: TableView, table: TableView) -> list[Text]:
    """Draw the blocks without a place, and the boundaries at which some of them will get one."""
    items = [Text("scratch", style="dim")]
    items += [Text.assemble(marked(block, block not in old.scratch)) for block in table.scratch]
    if table.boundaries:
        items.append(Text(f"to be named after {', '.join(map(str, table.boundaries))} tokens", style="dim"))
    return items


def _tokens(table: TableView) -> str:
    return f"{table.num_tokens} tokens: {table.num_cached_tokens} cached, {table.num_computed_tokens} computed"


def _entry(entry: EntryView, group: GroupView, block_size: int, *, is_new: bool) -> Text:
    block = group.blocks[entry.block]
    left, right = ("[", "]") if entry.sealed else ("(", ")")
    style = "magenta" if block.ref_count > 1 else "cyan" if entry.sealed else ""
    place = "" if kind_of(group.group) is Kind.FULL else f"{entry.table_index}:"
    return Text.assemble(
        (place, "dim"), marked(entry.block, is_new), (f"{left}{_content(entry, block, block_size)}{right}", style)
    )


def _content(entry: EntryView, block: BlockView, block_size: int) -> str:
    if block.num_tokens:
        return f"after {block.num_tokens}"
    return " ".join([*entry.words, *[EMPTY_SLOT] * (block_size - len(entry.words))])


def draw_free_list(before: GroupView, after: GroupView, width: int) -> list[Text]:
    """Draw the free list, the next block to be granted first."""
    items = [Text("head →", style="dim")]
    for block in after.free_list:
        view = after.blocks[block]
        words = f"after {view.num_tokens}" if view.num_tokens else " ".join(view.words)
        content = f"[{words}]" if view.state is State.CACHED else ""
        items.append(Text.assemble(marked(block, block not in before.free_list), (content, "green")))
    items.append(Text("← tail" if after.free_list else "empty", style="dim"))
    return flow("Free list", items, width, gap=2)

"""Draws the tables of the live sequences in one group, and its free list."""

from __future__ import annotations

from rich.text import Text

from .layouts import BLOCK_SIZE, Kind
from .lines import EMPTY_SLOT, flow, marked
from .snapshot import GroupView, TableView


def draw_tables(before: GroupView, after: GroupView, width: int) -> list[Text]:
    """Draw one or more lines for each live sequence."""
    if not after.tables:
        return flow("Tables", [Text("no live sequence", style="dim")], width)
    lines = []
    earlier = {table.sequence: table for table in before.tables}
    for table in after.tables:
        old = earlier.get(table.sequence, table._replace(entries={}, scratch=()))
        items = [
            _entry(index, block, after, is_new=old.entries.get(index) != block)
            for index, block in table.entries.items()
        ]
        if after.kind is Kind.FULL:
            tokens = (
                f"{table.num_tokens} tokens: {table.num_cached_tokens} cached, {table.num_computed_tokens} computed"
            )
            items.append(Text(tokens, style="dim"))
        else:
            items += _unnamed(old, table)
        lines += flow(f"{after.kind.value} {table.sequence}", items, width, gap=2)
    return lines


def _unnamed(old: TableView, table: TableView) -> list[Text]:
    """Draw the blocks without a place, and the boundaries at which some of them will get one."""
    items = [Text("scratch", style="dim")]
    items += [Text.assemble(marked(block, block not in old.scratch)) for block in table.scratch]
    if table.boundaries:
        items.append(Text(f"to be named after {', '.join(map(str, table.boundaries))} tokens", style="dim"))
    return items


def _entry(index: int, number: int, group: GroupView, *, is_new: bool) -> Text:
    block = group.blocks[number]
    left, right = ("[", "]") if block.sealed else ("(", ")")
    style = "magenta" if block.ref_count > 1 else "cyan" if block.sealed else ""
    place = "" if group.kind is Kind.FULL else f"{index}:"
    num_empty = 0 if group.kind is Kind.STATE else BLOCK_SIZE - len(block.words)
    content = " ".join([*block.words, *[EMPTY_SLOT] * num_empty])
    return Text.assemble((place, "dim"), marked(number, is_new), (f"{left}{content}{right}", style))


def draw_free_list(before: GroupView, after: GroupView, width: int) -> list[Text]:
    """Draw the free list, the next block to be granted first."""
    items = [Text("head →", style="dim")]
    for block in after.free_list:
        view = after.blocks[block]
        content = f"[{' '.join(view.words)}]" if view.state == "cached" else ""
        items.append(Text.assemble(marked(block, block not in before.free_list), (content, "green")))
    items.append(Text("← tail" if after.free_list else "empty", style="dim"))
    return flow("Free list", items, width, gap=2)

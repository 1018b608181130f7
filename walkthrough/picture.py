"""Draws the picture of one step: title, sentences, calls, block map, block tables and free list of each group, and prefix tree."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from rich.text import Text

from .block_map import draw_block_map
from .layouts import BLOCK_SIZE, Kind
from .lines import CHANGED_STYLE, EMPTY_SLOT, flow, marked
from .recording import Story, StoryStep
from .snapshot import GroupView, Snapshot, TableView

WIDTH_MAX: Final = 120
_WIDTH_MIN: Final = 60


def draw_step(story: Story, steps: Sequence[StoryStep], index: int, width: int) -> list[Text]:
    """Draw the lines of one step, each at most `width` columns wide (at least 60, at most 120 are used)."""
    width = max(_WIDTH_MIN, min(width, WIDTH_MAX))
    step = steps[index]
    lines = _intro(story, steps, index, width)
    parts = [part for group in range(len(step.after.groups)) for part in _group(step, group, width)]
    if story.shows_tree:
        parts.append(_tree(step.before, step.after, width))
    if step.violations:
        parts.append(_violations(step, width))
    for part in parts:
        lines += [Text(), *part]
    return lines


def draw_legend(story: Story, width: int) -> list[Text]:
    """Draw the meaning of the signs."""
    signs = [
        "* changed in this step",
        "×2 ref_count: in 2 tables",
        "g3 generation: granted by call 3",
        "[…] sealed: full and computed, a hit",
        "(…) not sealed",
        f"{EMPTY_SLOT} empty slot",
        "one word is one token",
    ]
    if len(story.layout) > 1:
        signs += ["3: entry 3 of a table with holes", "scratch: held without a place"]
    return flow("", [Text(sign, style="dim") for sign in signs], max(_WIDTH_MIN, min(width, WIDTH_MAX)), gap=3)


def _intro(story: Story, steps: Sequence[StoryStep], index: int, width: int) -> list[Text]:
    """Draw what happens and why, and the calls."""
    step = steps[index]
    position = f"{story.name} {index + 1}/{len(steps)}"
    lines = []
    for number, line in enumerate(textwrap.wrap(step.title, width - len(position) - 3)):
        lead = position if number == 0 else " " * len(position)
        lines.append(Text.assemble((f"{lead} │ ", "dim"), (line, "bold")))
    lines.append(Text("─" * width, style="dim"))
    lines += [Text(line) for line in textwrap.wrap(step.sentences, width)]
    lines.append(Text())
    for call in step.calls:
        first, *others = call.splitlines()
        lines += _hang("  > ", first, width)
        for item in others:
            lines += _hang("  + ", item, width)
    return lines


def _hang(lead: str, call: str, width: int) -> list[Text]:
    indent = " " * (len(lead) + 2)
    lines = textwrap.wrap(call, width, initial_indent=lead, subsequent_indent=indent, break_long_words=False)
    return [Text(line, style="green") for line in lines]


# -- groups and tree


def _group(step: StoryStep, index: int, width: int) -> list[list[Text]]:
    """Draw the parts of one group."""
    before, after = step.before.groups[index], step.after.groups[index]
    blocks = draw_block_map(before, after, width)
    if len(step.after.groups) > 1:
        blocks = [*flow(f"Group {index}", list(map(Text, after.kind.title.split())), width), *blocks]
    return [blocks, _tables(before, after, width), _free_list(before, after, width)]


def _tables(before: GroupView, after: GroupView, width: int) -> list[Text]:
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
        lines += flow(f"{after.kind.label} {table.sequence}", items, width, gap=2)
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


def _free_list(before: GroupView, after: GroupView, width: int) -> list[Text]:
    """Draw the free list, the next block to be granted first."""
    items = [Text("head →", style="dim")]
    for block in after.free_list:
        view = after.blocks[block]
        content = f"[{' '.join(view.words)}]" if view.state == "cached" else ""
        items.append(Text.assemble(marked(block, block not in before.free_list), (content, "green")))
    items.append(Text("← tail" if after.free_list else "empty", style="dim"))
    return flow("Free list", items, width, gap=2)


def _tree(before: Snapshot, after: Snapshot, width: int) -> list[Text]:
    lines = flow("Prefix tree", [Text("name (block_hash), and the block that is a hit", style="dim")], width)
    named_before = {node.block_hash for node in before.tree}
    for node in after.tree:
        name = "no name yet" if node.block_hash is None else f"{node.block_hash:016x}"
        if not node.depth:
            lines.append(Text(f"  {name}  root", style="dim"))
            continue
        is_new = node.block_hash not in named_before
        where = f"block {node.block}" if node.block else ""
        computing = f"{' and '.join(node.leaders)} computing it" if node.leaders else ""
        lines.append(
            Text.assemble(
                ("   " * node.depth + "└─ ", "dim"),
                (f"{'*' if is_new else ''}{name}", CHANGED_STYLE if is_new else "green"),
                f"  {' '.join(node.words)}  ",
                ("  ".join(filter(None, (where, computing))), "dim"),
            )
        )
    return lines


def _violations(step: StoryStep, width: int) -> list[Text]:
    lines = [Text("The core breaks its own laws after this step:", style="bold red")]
    for violation in step.violations:
        lines += [Text(line, style="red") for line in textwrap.wrap(f"{violation.law}: {violation.message}", width)]
    return lines

"""The picture of one step: title, sentences, calls, block map, block tables, free list and prefix tree.

Every mark is a sign, colours only repeat it: without them the picture says the same.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from rich.text import Text

from ..core.block_pool import State
from .changes import changed_blocks
from .recording import Case, Step
from .snapshot import BlockView, EntryView, NodeView, Snapshot, TableView

WIDTH_MAX: Final = 120
_WIDTH_MIN: Final = 60
_LABEL: Final = 13
"""Columns of the labels on the left."""
_NULL_TILE: Final = 7
_TILES_PER_ROW: Final = 8
_WIDE_TILE: Final = 13
"""Columns of a tile that has room for its words, two to a line."""
_NARROW_TILE: Final = 8
_TILE_STYLES: Final = {
    State.FREE: "dim",
    State.CACHED: "black on green",
    State.HELD: "black on cyan",
    State.RESERVED: "black on yellow",
}
_UNSEALED_STYLE: Final = "bold cyan"
"""Held by one sequence only: no background, because the block is not filled and computed."""
_SHARED_STYLE: Final = "bold black on magenta"
_CHANGED_STYLE: Final = "bold yellow"
_EMPTY_SLOT: Final = "·"


def draw_step(
    case: Case, steps: Sequence[Step], index: int, width: int, *, compact: bool = False, steady: bool = False
) -> list[Text]:
    """The lines of one step, each at most `width` columns (at least 60, at most 120 are used).

    `compact` saves lines; `steady` puts the block map on the same line in all steps of the case.
    """
    width = max(_WIDTH_MIN, min(width, WIDTH_MAX))
    step = steps[index]
    changed = changed_blocks(step.before, step.after)
    intros = [_intro(case, steps, number, width, compact=compact) for number in range(len(steps))]
    lines = intros[index]
    if steady:
        lines += [Text()] * (max(map(len, intros)) - len(lines))
    parts = [
        [*_block_map(step.after, changed, width, compact=compact), *_changes(changed, width)],
        _tables(step.before, step.after, width),
        _free_list(step.before, step.after, width),
    ]
    if case.shows_tree:
        parts.append(_tree(step.before, step.after, width))
    if step.violations:
        parts.append(_violations(step, width))
    for part in parts:
        lines += part if compact else [Text(), *part]
    return lines


def draw_legend(width: int) -> list[Text]:
    """What the signs mean."""
    signs = (
        "* changed in this step",
        "×2 ref_count: in 2 tables",
        "g3 generation: granted by call 3",
        "[…] sealed: full and computed, a hit",
        "(…) not sealed",
        f"{_EMPTY_SLOT} empty slot",
        "one word is one token",
    )
    return _flow("", [Text(sign, style="dim") for sign in signs], max(_WIDTH_MIN, min(width, WIDTH_MAX)), gap=3)


def _intro(case: Case, steps: Sequence[Step], index: int, width: int, *, compact: bool) -> list[Text]:
    """What happens and why, and the call that makes it happen."""
    step = steps[index]
    position = f"{case.name} {index + 1}/{len(steps)}"
    lines = []
    for number, line in enumerate(textwrap.wrap(step.scene.title, width - len(position) - 3)):
        lead = position if number == 0 else " " * len(position)
        lines.append(Text.assemble((f"{lead} │ ", "dim"), (line, "bold")))
    lines.append(Text("─" * width, style="dim"))
    lines += [Text(line) for line in textwrap.wrap(" ".join(step.scene.sentences.split()), width)]
    if not compact:
        lines.append(Text())
    for number, call in enumerate(step.calls):
        # Several items of one call.
        lines += _hang("  + " if number else "  > ", call, width)
    return lines


def _hang(lead: str, call: str, width: int) -> list[Text]:
    indent = " " * (len(lead) + 2)
    lines = textwrap.wrap(call, width, initial_indent=lead, subsequent_indent=indent, break_long_words=False)
    return [Text(line, style="green") for line in lines]


# -- the block map


def _block_map(snapshot: Snapshot, changed: dict[int, str], width: int, *, compact: bool) -> list[Text]:
    counts = snapshot.counts
    words = (
        f"{counts.capacity} of {snapshot.block_size} tokens:",
        f"{counts.free} free,",
        f"{counts.cached} cached,",
        f"{counts.held} held{f' ({counts.shared} shared)' if counts.shared else ''},",
        f"{counts.reserved} reserved;",
        f"{snapshot.num_evicted} evicted",
    )
    lines = _flow("Blocks", [Text(word, style="dim") for word in words], width)
    with_words = not compact and width >= _NULL_TILE + _TILES_PER_ROW * (_WIDE_TILE + 1)
    tile = _WIDE_TILE if with_words else _NARROW_TILE
    null, *blocks = snapshot.blocks
    per_row = min(_TILES_PER_ROW, (width - _NULL_TILE) // (tile + 1))
    for begin in range(0, len(blocks), per_row):
        row = [
            _tile(block, tile, snapshot.block_size, is_changed=block.block in changed, with_words=with_words)
            for block in blocks[begin : begin + per_row]
        ]
        lead = _null_tile(null, len(row[0])) if begin == 0 else [Text(" " * _NULL_TILE)] * len(row[0])
        if begin and not compact:
            lines.append(Text())
        for line in zip(lead, *row, strict=True):
            lines.append(Text.assemble(line[0], *(part for text in line[1:] for part in ("│", text))))
    return lines


def _null_tile(null: BlockView, height: int) -> list[Text]:
    lines = [f"{null.block:>3}", "null"]
    lines += [""] * (height - len(lines))
    return [Text(f" {line:<{_NULL_TILE - 1}}", style="dim") for line in lines]


def _tile(block: BlockView, width: int, block_size: int, *, is_changed: bool, with_words: bool) -> list[Text]:
    """Block id and generation; state and ref_count; and, if there is room, the words in two lines."""
    style = _SHARED_STYLE if block.ref_count > 1 else _TILE_STYLES[block.state]
    if block.state is State.HELD and not block.sealed:
        style = _UNSEALED_STYLE
    generation = f"g{block.generation}" if block.generation else ""
    ref_count = f"×{block.ref_count}" if block.ref_count else ""
    head = f"{'*' if is_changed else ' '}{block.block}"
    lines = [_ends(head, generation, width), _ends(f" {block.state.name.lower()}"[-width:], ref_count, width)]
    if with_words:
        words = [*block.words, *[""] * block_size][:block_size]
        half = (block_size + 1) // 2
        for piece in (words[:half], words[half:]):
            line = " ".join(piece).strip()
            lines.append(f" {line:<{width - 1}}"[:width])
    texts = [Text(line, style=style) for line in lines]
    if is_changed:
        texts[0].stylize("bold")
    return texts


def _ends(left: str, right: str, width: int) -> str:
    """Both, as far apart as the width allows."""
    return f"{left}{right:>{max(0, width - len(left))}}"


def _changes(changed: dict[int, str], width: int) -> list[Text]:
    if not changed:
        return _flow("Changed", [Text("nothing")], width)
    items = []
    by_kind: dict[str, list[int]] = {}
    for block, kind in changed.items():
        by_kind.setdefault(kind, []).append(block)
    for number, (kind, blocks) in enumerate(by_kind.items()):
        end = "" if number == len(by_kind) - 1 else ";"
        items.append(Text.assemble((_ranges(blocks), _CHANGED_STYLE), f" {kind}{end}"))
    return _flow("Changed", items, width, gap=2)


def _ranges(blocks: Iterable[int]) -> str:
    """1–4, 7"""
    parts = []
    for _, run in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
        members = [block for _, block in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}")
    return ", ".join(parts)


# -- tables, free list, tree


def _tables(before: Snapshot, after: Snapshot, width: int) -> list[Text]:
    if not after.tables:
        return _flow("Tables", [Text("no live sequence", style="dim")], width)
    lines = []
    earlier = {table.sequence_id: table for table in before.tables}
    for table in after.tables:
        known = earlier.get(table.sequence_id)
        items = [_entry(entry, after, is_new=known is None or entry not in known.entries) for entry in table.entries]
        items.append(Text(_tokens(table), style="dim"))
        lines += _flow(f"Table {table.sequence_id}", items, width, gap=2)
    return lines


def _tokens(table: TableView) -> str:
    return f"{table.num_tokens} tokens: {table.num_cached_tokens} cached, {table.num_computed_tokens} computed"


def _entry(entry: EntryView, snapshot: Snapshot, *, is_new: bool) -> Text:
    words = [*entry.words, *[_EMPTY_SLOT] * (snapshot.block_size - len(entry.words))]
    left, right = ("[", "]") if entry.sealed else ("(", ")")
    is_shared = snapshot.blocks[entry.block].ref_count > 1
    style = "magenta" if is_shared else "cyan" if entry.sealed else ""
    return Text.assemble(_marked(entry.block, is_new), (f"{left}{' '.join(words)}{right}", style))


def _marked(block: int, is_new: bool) -> tuple[str, str]:
    return (f"*{block}", _CHANGED_STYLE) if is_new else (str(block), "bold")


def _free_list(before: Snapshot, after: Snapshot, width: int) -> list[Text]:
    items = [Text("head →", style="dim")]
    for block in after.free_list:
        view = after.blocks[block]
        content = f"[{' '.join(view.words)}]" if view.state is State.CACHED else ""
        items.append(Text.assemble(_marked(block, block not in before.free_list), (content, "green")))
    items.append(Text("← tail" if after.free_list else "empty", style="dim"))
    return _flow("Free list", items, width, gap=2)


def _tree(before: Snapshot, after: Snapshot, width: int) -> list[Text]:
    lines = _flow("Prefix tree", [Text("name (block_hash), and the block that is a hit", style="dim")], width)
    named_before = {node.block_hash for root in before.roots for node in _walk(root)}
    for root in after.roots:
        lines.append(Text(f"  {_name(root)}  root", style="dim"))
        lines += _branches(root.children, "  ", named_before)
    return lines


def _branches(nodes: Sequence[NodeView], indent: str, named_before: set[int | None]) -> list[Text]:
    lines = []
    for number, node in enumerate(nodes):
        is_last = number == len(nodes) - 1
        is_new = node.block_hash not in named_before
        where = f"block {node.block}" if node.block else ""
        computing = f"{' and '.join(node.leaders)} computing it" if node.leaders else ""
        lines.append(
            Text.assemble(
                (f"{indent}{'└─' if is_last else '├─'} ", "dim"),
                (f"{'*' if is_new else ''}{_name(node)}", _CHANGED_STYLE if is_new else "green"),
                f"  {' '.join(node.words)}  ",
                ("  ".join(filter(None, (where, computing))), "dim"),
            )
        )
        lines += _branches(node.children, f"{indent}{'   ' if is_last else '│  '}", named_before)
    return lines


def _walk(node: NodeView) -> Iterable[NodeView]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _name(node: NodeView) -> str:
    return "no name yet" if node.block_hash is None else f"{node.block_hash:016x}"


def _violations(step: Step, width: int) -> list[Text]:
    lines = [Text("The core breaks its own laws after this step:", style="bold red")]
    for violation in step.violations:
        lines += [Text(line, style="red") for line in textwrap.wrap(f"{violation.law}: {violation.message}", width)]
    return lines


def _flow(label: str, items: Sequence[Text], width: int, *, label_style: str = "bold", gap: int = 1) -> list[Text]:
    """The items after a label, in lines of at most `width` columns that begin below the first item."""
    indent = _LABEL if label else 0
    lines = [Text.assemble((f"{label:<{indent}}", label_style))]
    column = indent
    for number, item in enumerate(items):
        if column > indent and column + gap + item.cell_len > width:
            lines.append(Text(" " * indent))
            column = indent
        elif number:
            lines[-1].append(" " * gap)
            column += gap
        lines[-1].append_text(item)
        column += item.cell_len
    return lines

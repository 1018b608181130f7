"""Draws the block map of one group: a tile for each block, and the changes of the step in words."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from rich.text import Text

from .layouts import BLOCK_SIZE, Kind
from .lines import CHANGED_STYLE, flow
from .snapshot import BlockView, GroupView, changed_blocks

_NULL_TILE: Final = 7
_TILES_PER_ROW: Final = 8
_WIDE_TILE: Final = 13
"""Columns of a tile with room for its words, two on each line."""
_NARROW_TILE: Final = 8
_TILE_STYLES: Final = {
    "free": "dim",
    "cached": "black on green",
    "held": "black on cyan",
    "reserved": "black on yellow",
}
_UNSEALED_STYLE: Final = "bold cyan"
"""Style of a block that one sequence holds and has not filled and computed: without a background."""
_SHARED_STYLE: Final = "bold black on magenta"


def draw_block_map(before: GroupView, after: GroupView, width: int) -> list[Text]:
    """Draw the tiles, then the changes."""
    changed = changed_blocks(before, after)
    return [*_tiles(after, changed, width), *_changes(changed, width)]


def _tiles(group: GroupView, changed: dict[int, str], width: int) -> list[Text]:
    counts = group.counts
    words = (
        f"{counts.capacity} states:" if group.kind is Kind.STATE else f"{counts.capacity} of {BLOCK_SIZE} tokens:",
        f"{counts.free} free,",
        f"{counts.cached} cached,",
        f"{counts.held} held{f' ({counts.shared} shared)' if counts.shared else ''},",
        f"{counts.reserved} reserved;",
        f"{group.num_evicted} evicted",
    )
    lines = flow("Blocks", [Text(word, style="dim") for word in words], width)
    with_words = width >= _NULL_TILE + _TILES_PER_ROW * (_WIDE_TILE + 1)
    tile = _WIDE_TILE if with_words else _NARROW_TILE
    null, *blocks = group.blocks
    per_row = min(_TILES_PER_ROW, (width - _NULL_TILE) // (tile + 1))
    for begin in range(0, len(blocks), per_row):
        row = [
            _tile(block, tile, is_changed=block.block in changed, with_words=with_words)
            for block in blocks[begin : begin + per_row]
        ]
        lead = _null_tile(null, len(row[0])) if begin == 0 else [Text(" " * _NULL_TILE)] * len(row[0])
        if begin:
            lines.append(Text())
        for line in zip(lead, *row, strict=True):
            lines.append(Text.assemble(line[0], *(part for text in line[1:] for part in ("│", text))))
    return lines


def _null_tile(null: BlockView, height: int) -> list[Text]:
    lines = [f"{null.block:>3}", "null"]
    lines += [""] * (height - len(lines))
    return [Text(f" {line:<{_NULL_TILE - 1}}", style="dim") for line in lines]


def _tile(block: BlockView, width: int, *, is_changed: bool, with_words: bool) -> list[Text]:
    """Draw a tile: block id and generation; state and ref_count; and, if there is room, the words in two lines."""
    style = _SHARED_STYLE if block.ref_count > 1 else _TILE_STYLES[block.state]
    if block.state == "held" and not block.sealed:
        style = _UNSEALED_STYLE
    generation = f"g{block.generation}" if block.generation else ""
    ref_count = f"×{block.ref_count}" if block.ref_count and not block.is_scratch else ""
    head = f"{'*' if is_changed else ' '}{block.block}"
    lines = [_ends(head, generation, width), _ends(f" {block.role}"[-width:], ref_count, width)]
    if with_words:
        half = (BLOCK_SIZE + 1) // 2
        for piece in (block.words[:half], block.words[half:]):
            line = " ".join(piece)
            lines.append(f" {line:<{width - 1}}"[:width])
    texts = [Text(line, style=style) for line in lines]
    if is_changed:
        texts[0].stylize("bold")
    return texts


def _ends(left: str, right: str, width: int) -> str:
    """Join two texts at the two ends of the width."""
    return f"{left}{right:>{max(0, width - len(left))}}"


def _changes(changed: dict[int, str], width: int) -> list[Text]:
    if not changed:
        return flow("Changed", [Text("nothing")], width)
    items = []
    by_kind: dict[str, list[int]] = {}
    for block, kind in changed.items():
        by_kind.setdefault(kind, []).append(block)
    for number, (kind, blocks) in enumerate(by_kind.items()):
        end = "" if number == len(by_kind) - 1 else ";"
        items.append(Text.assemble((_ranges(blocks), CHANGED_STYLE), f" {kind}{end}"))
    return flow("Changed", items, width, gap=2)


def _ranges(blocks: Iterable[int]) -> str:
    """Write blocks as ranges: 1–4, 7."""
    parts = []
    for _, run in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
        members = [block for _, block in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}")
    return ", ".join(parts)

"""`kvpool blocks`: the block map of a worker as a picture in the terminal, one cell per block."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Annotated, Final

import typer
from rich.text import Text

from kvpool.client.block_map import BlockMap, fetch_block_maps
from kvpool.client.client import Client
from kvpool.client.errors import NotFound
from kvpool.process.printable import printable
from kvpool.v1 import cache_pb2

from ..terminal import JsonOption, ManagerOption, client_config, print_json, stdout_console

_COLOURS: Final = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
_LABEL_CELLS: Final = 8
_INDENT: Final = " " * _LABEL_CELLS
_CELLS_PER_ROW_MAX: Final = 128
_LEGEND_OWNERS_MAX: Final = 16

_NULL: Final = "∅"
_UNKNOWN: Final = ("?", "red")
_PLAIN_CELLS: Final = {
    cache_pb2.BLOCK_STATE_UNSPECIFIED: _UNKNOWN,
    cache_pb2.BLOCK_STATE_FREE: ("·", "dim"),
    cache_pb2.BLOCK_STATE_CACHED: ("▒", "green"),
    cache_pb2.BLOCK_STATE_RESERVED: ("+", "dim yellow"),
    cache_pb2.BLOCK_STATE_COPYING: ("~", "blue"),
}
_STATE_NAMES: Final = {
    cache_pb2.BLOCK_STATE_UNSPECIFIED: "unknown",
    cache_pb2.BLOCK_STATE_FREE: "free",
    cache_pb2.BLOCK_STATE_CACHED: "cached",
    cache_pb2.BLOCK_STATE_HELD: "held",
    cache_pb2.BLOCK_STATE_RESERVED: "reserved",
    cache_pb2.BLOCK_STATE_COPYING: "copying",
}


def render_block_map(block_map: BlockMap, width: int, height: int | None = None) -> Text:
    """Draw the picture, at most `width` columns wide, with its counts and legend. Every state has a sign of its own, so it can be
    read without colours. With `height`, rows that do not fit are left out and counted in the last line."""
    owners = _name_owners(block_map.blocks)
    cells = {block.block_id: _cell(block, owners) for block in block_map.blocks}
    cells[0] = (_NULL, "dim")
    per_row = _cells_per_row(width)
    text = Text(no_wrap=True)
    text.append(printable(block_map.worker_id), style="bold")
    if block_map.num_groups > 1:
        text.append(f", group {block_map.group}")
    if window := block_map.spec.sliding_window.window_tokens:
        text.append(f", window of {window:,} tokens")
    if block_map.spec.HasField("state"):
        text.append(", states of recurrent layers")
    if block_map.spec.HasField("cross_attention"):
        text.append(", inputs of the encoder")
    text.append(f": {block_map.num_blocks:,} blocks of {block_map.block_size} tokens\n{_INDENT}{_counts(block_map)}\n")
    max_owners = _LEGEND_OWNERS_MAX if height is None else max(1, min(_LEGEND_OWNERS_MAX, height // 4))
    legend = _legend(block_map.blocks, owners, width, max_owners)
    # Two lines are above the rows; the last row is for the number of rows left out.
    max_lines = None if height is None else max(1, height - 3 - (legend.plain.count("\n") + 1))
    rows = [
        range(start, min(start + per_row, block_map.num_blocks)) for start in range(0, block_map.num_blocks, per_row)
    ]
    index = num_lines = 0
    while index < len(rows):
        row = rows[index]
        if num_lines == max_lines:
            text.append(f"{_INDENT}… {len(rows) - index} more rows, from block {row[0]}\n", style="dim")
            break
        num_lines += 1
        num_same = _num_uniform_rows(rows[index:], cells)
        if num_same > 2:
            last = rows[index + num_same - 1]
            sign, style = cells[row[0]]
            text.append(f"{row[0]:>{_LABEL_CELLS - 1}} ", style="dim")
            text.append(sign * 3, style=style)
            text.append(f" … {num_same} rows like this, up to block {last[-1]}\n", style="dim")
            index += num_same
            continue
        text.append(f"{row[0]:>{_LABEL_CELLS - 1}} ", style="dim")
        in_row = [cells.get(block_id, _UNKNOWN) for block_id in row]
        for style, run in groupby(in_row, key=lambda cell: cell[1]):
            text.append("".join(sign for sign, _ in run), style=style)
        text.append("\n")
        index += 1
    text.append_text(legend)
    return text


class _Owner:
    """A live sequence in the picture."""

    def __init__(self, index: int, sequence_id: str) -> None:
        self.letter = chr(ord("A") + index % 26)
        self.style = _COLOURS[index % len(_COLOURS)]
        self.sequence_id = sequence_id
        self.num_blocks = 0


def _name_owners(blocks: Sequence[cache_pb2.BlockDescription]) -> dict[tuple[str, int], _Owner]:
    owners: dict[tuple[str, int], _Owner] = {}
    for block in blocks:
        for key in block.owners:
            name = (key.sequence_id, key.attempt)
            if name not in owners:
                owners[name] = _Owner(len(owners), key.sequence_id)
            owners[name].num_blocks += 1
    return owners


def _cell(block: cache_pb2.BlockDescription, owners: dict[tuple[str, int], _Owner]) -> tuple[str, str]:
    if block.state != cache_pb2.BLOCK_STATE_HELD:
        return _PLAIN_CELLS.get(block.state, _UNKNOWN)
    if block.ref_count > 1:
        return (str(block.ref_count) if block.ref_count < 10 else "#", "bold reverse")
    if not block.owners:
        return ("!", "red")
    owner = owners[(block.owners[0].sequence_id, block.owners[0].attempt)]
    return (owner.letter if block.sealed else owner.letter.lower(), owner.style)


def _cells_per_row(width: int) -> int:
    per_row = _CELLS_PER_ROW_MAX
    while per_row > 16 and per_row + _LABEL_CELLS > width:
        per_row //= 2
    return per_row


def _num_uniform_rows(rows: Sequence[range], cells: dict[int, tuple[str, str]]) -> int:
    """Count the rows from the first on that consist of one and the same plain cell."""
    first = cells.get(rows[0][0])
    if first is None or first not in _PLAIN_CELLS.values():
        return 0
    uniform = takewhile(lambda row: all(cells.get(block_id) == first for block_id in row), rows)
    return sum(1 for _ in uniform)


def _counts(block_map: BlockMap) -> str:
    states = Counter(block.state for block in block_map.blocks if block.block_id != 0)
    shared = sum(1 for block in block_map.blocks if block.state == cache_pb2.BLOCK_STATE_HELD and block.ref_count > 1)
    parts = []
    for state, name in _STATE_NAMES.items():
        if states[state] or state in (cache_pb2.BLOCK_STATE_FREE, cache_pb2.BLOCK_STATE_CACHED):
            parts.append(f"{states[state]:,} {name}")
        if state == cache_pb2.BLOCK_STATE_HELD and shared:
            parts[-1] += f" ({shared:,} shared)"
    return ", ".join(parts)


def _legend(
    blocks: Sequence[cache_pb2.BlockDescription], owners: dict[tuple[str, int], _Owner], width: int, max_owners: int
) -> Text:
    """Explain the signs that occur, then list the owners. What does not fit on one line is wrapped."""
    present = {block.state for block in blocks}
    items = [
        Text.assemble((sign, style), (f" {_STATE_NAMES[state]}", "dim"))
        for state, (sign, style) in _PLAIN_CELLS.items()
        if state in present
    ]
    items.append(Text.assemble((_NULL, "dim"), (" null block", "dim")))
    if any(block.state == cache_pb2.BLOCK_STATE_HELD and block.ref_count > 1 for block in blocks):
        items.append(Text.assemble(("2 … 9", "bold"), (" held by that many sequences", "dim")))
        items.append(Text.assemble(("#", "bold"), (" by more", "dim")))
    if owners:
        items.append(Text.assemble(("A", "bold"), (" held by one", "dim")))
        items.append(Text.assemble(("a", "bold"), (" not sealed yet", "dim")))
    text = _flow(items, width)
    for owner in list(owners.values())[:max_owners]:
        num = f"{owner.num_blocks} block{'' if owner.num_blocks == 1 else 's'}"
        text.append(f"\n{_INDENT}")
        text.append(owner.letter, style=owner.style)
        text.append(f" {printable(owner.sequence_id)}: {num}", style="dim")
    if len(owners) > max_owners:
        text.append(f"\n{_INDENT}… and {len(owners) - max_owners} more sequences", style="dim")
    return text


def _flow(items: Sequence[Text], width: int) -> Text:
    """Join the items with three spaces, in lines of at most `width` columns."""
    text = Text(_INDENT)
    column = len(_INDENT)
    for index, item in enumerate(items):
        if index and column + 3 + len(item) > width:
            text.append(f"\n{_INDENT}")
            column = len(_INDENT)
        elif index:
            text.append("   ")
            column += 3
        text.append_text(item)
        column += len(item)
    return text


def block_map_object(block_map: BlockMap) -> dict[str, object]:
    """Return the blocks of one group of a worker for `--json`, without the null block. The names are part of the interface."""
    return {
        "worker_id": block_map.worker_id,
        "group": block_map.group,
        "block_size": block_map.block_size,
        "num_blocks": block_map.num_blocks,
        "blocks": [
            {
                "block_id": block.block_id,
                "state": _STATE_NAMES.get(block.state, "unknown"),
                "ref_count": block.ref_count,
                "generation": block.generation,
                "token_count": block.token_count,
                "sealed": block.sealed,
                "block_hash": f"{block.block_hash:016x}" if block.sealed else None,
                "table_index": block.table_index,
                "owners": [f"{key.sequence_id}/{key.attempt}/{key.round}" for key in block.owners],
            }
            for block in block_map.blocks
            if block.block_id
        ],
    }


def blocks(
    worker: Annotated[str | None, typer.Option(help="Only this worker.")] = None,
    as_json: JsonOption = False,
    manager: ManagerOption = None,
) -> None:
    """The block map as a picture: state, sharing and owner of every block."""
    config = client_config(manager)

    async def fetch() -> list[BlockMap]:
        async with Client(config=config) as client:
            live = sorted(description.worker_id for description in (await client.describe()).workers)
            if worker is not None and worker not in live:
                names = ", ".join(live) or "none"
                raise NotFound(f"no live worker {worker!r}; there are: {names}", reason="UNKNOWN_WORKER")
            maps = [await fetch_block_maps(client, worker_id) for worker_id in ([worker] if worker else live)]
            return [block_map for of_worker in maps for block_map in of_worker]

    block_maps = asyncio.run(fetch())
    if as_json:
        print_json({"workers": [block_map_object(block_map) for block_map in block_maps]})
        return
    console = stdout_console()
    if not block_maps:
        console.print(f"manager {config.manager}: no live worker; start one with `kvpool worker`", markup=False)
    for index, block_map in enumerate(block_maps):
        if index:
            console.print()
        console.print(render_block_map(block_map, console.width))

"""Draws the requests of one worker for `kvpool top`, from the manager's description of its live sequences. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpool.process.printable import printable
from kvpool.v1 import cache_pb2

from .rates import SequenceName, sequence_name

_ID_CELLS_MIN: Final = 10
_ID_CELLS_MAX: Final = 36
"""Cells of a UUID, which the client library gives each request."""
_COLUMNS: Final = {
    "state": 10, "known tokens": 12, "computed": 8, "cached": 7, "gen/s": 5, "blocks": 6, "attempt": 7, "round": 5,
}  # fmt: skip
"""Columns after the request's name, each with its usual width, so that none moves. The last ones are left out if the terminal is
too narrow."""
_GAP_CELLS: Final = 2
_NONE: Final = "–"


def num_lines_wanted(worker: cache_pb2.WorkerDescription) -> int:
    """Count the lines of a list with all requests that the manager has reported."""
    num_rows = len(worker.sequences)
    return 2 + num_rows + (num_rows < worker.num_sequences) if num_rows else 1


def render_requests(
    worker: cache_pb2.WorkerDescription, rates: Mapping[SequenceName, float | None], width: int, max_lines: int
) -> RenderableType:
    """Draw the requests that fit into `max_lines`, and the number of the others. `rates` are generated tokens per second."""
    title = _title(worker)
    num_rows = len(worker.sequences) if num_lines_wanted(worker) <= max_lines else max_lines - 3
    if num_rows <= 0:
        return title
    table = _table(worker, rates, num_rows, width)
    num_more = worker.num_sequences - num_rows
    if not num_more:
        return Group(title, table)
    return Group(title, table, Text(f"… and {num_more:,} more", style="dim"))


def _title(worker: cache_pb2.WorkerDescription) -> Text:
    """Return the title: the worker, and the number of requests that hold blocks. Only their worker knows those that wait."""
    text = Text("requests of ", no_wrap=True, overflow="ellipsis")
    text.append(printable(worker.worker_id), style="bold")
    num = worker.num_sequences
    text.append(f": {num:,} hold{'s' if num == 1 else ''} blocks" if num else ": none holds blocks")
    if num > 1:
        text.append(", the oldest first")
    if waiting := worker.load.num_waiting:
        text.append(f"; {waiting:,} wait{'s' if waiting == 1 else ''} for a turn")
    return text


def _table(
    worker: cache_pb2.WorkerDescription, rates: Mapping[SequenceName, float | None], num_rows: int, width: int
) -> Table:
    sequences = worker.sequences[:num_rows]
    rows = [
        _cells(sequence, rates.get(sequence_name(worker, sequence)), worker.kv_cache_config.block_size)
        for sequence in sequences
    ]
    left = width - _ID_CELLS_MIN
    columns: dict[str, int] = {}
    for name, usual in _COLUMNS.items():
        cells = max(usual, *(len(row[name]) for row in rows))
        if left < _GAP_CELLS + cells:
            break
        left -= _GAP_CELLS + cells
        columns[name] = cells
    table = Table(box=None, pad_edge=False, padding=(0, _GAP_CELLS, 0, 0))
    table.add_column("request", no_wrap=True, overflow="ellipsis", max_width=min(_ID_CELLS_MAX, _ID_CELLS_MIN + left))
    for name, cells in columns.items():
        table.add_column(name, no_wrap=True, min_width=cells, justify="left" if name == "state" else "right")
    for sequence, row in zip(sequences, rows, strict=True):
        table.add_row(Text(printable(sequence.key.sequence_id)), *(row[name] for name in columns))
    return table


def _cells(sequence: cache_pb2.SequenceDescription, rate: float | None, block_size: int) -> dict[str, Text]:
    """Return one row by column name, as Text: in a plain string rich would look for markup."""
    cells = {
        "known tokens": f"{sequence.num_tokens:,}",
        "computed": f"{sequence.num_computed_tokens / max(1, sequence.num_tokens):.0%}",
        "cached": f"{sequence.num_cached_tokens:,}",
        "gen/s": _NONE if rate is None else f"{rate:,.0f}",
        "blocks": f"{sequence.num_blocks:,}",
        "attempt": str(sequence.key.attempt),
        "round": str(sequence.key.round),
    }
    return {"state": _state(sequence, block_size)} | {name: Text(cell) for name, cell in cells.items()}


def _state(sequence: cache_pb2.SequenceDescription, block_size: int) -> Text:
    """Return the state of a sequence according to the manager. A decoding sequence is reported block by block, so less than a block
    of its tokens is not computed. A prompt whose other blocks are all cached looks the same for an instant."""
    if sequence.fenced:
        return Text("fenced", style="red")
    if sequence.num_tokens - sequence.num_computed_tokens >= max(2, block_size):
        return Text("prefilling", style="yellow")
    return Text("decoding", style="green")

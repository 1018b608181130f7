"""Draws the picture of `kvpool top` from the fetched data. Pure: no calls, no waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpool.client.block_map import BlockMap
from kvpool.process.printable import printable
from kvpool.v1 import cache_pb2, common_pb2

from ..commands.block_map import render_block_map
from ..commands.status import device_counts, sum_counts
from .rates import Rates, SequenceName
from .requests import num_lines_wanted, render_requests

_WIDE: Final = 104
"""Width in which everything has its place; below it the bar is shorter and the last columns are left out."""
_BAR_CELLS: Final = 24
_BAR_CELLS_NARROW: Final = 12
_BAR: Final = (("held", "█", "cyan"), ("reserved", "+", "yellow"), ("copying", "~", "blue"), ("cached", "▒", "green"))
"""Parts of the bar in order from the left: state, sign and colour. Free blocks are at the right."""
_FREE: Final = ("·", "dim")
_NONE: Final = "–"
_ROWS_WITHOUT_A_TERMINAL: Final = 20
"""Rows of requests if the height of the picture is not limited."""
_MAP_LINES_MIN: Final = 6
KEYS: Final = "↑ ↓ another worker   r requests   b block map   q quit"


class _DrawnMap(NamedTuple):
    """A drawn block map, with its data and size."""

    block_map: BlockMap
    width: int
    height: int | None
    text: Text

    def serves(self, block_map: BlockMap, width: int, height: int | None) -> bool:
        """Whether the drawing can be used again. The height changes with each request that comes or goes, so a drawing that fits is
        used unless there is room for half as much again."""
        if self.block_map is not block_map or self.width != width:
            return False
        if self.height is None or height is None:
            return self.height is height
        return self.height <= height <= self.height * 3 // 2


@dataclass(slots=True)
class Picture:
    manager: str
    """host:port of the manager."""
    response: cache_pb2.DescribeResponse | None = None
    """Last answer of the manager; None before the first."""
    away: str = ""
    """Why and for how long the manager has not answered; empty while it answers."""
    rates: dict[int, Rates | None] = field(default_factory=dict)
    """Rates by session; None: no rate yet."""
    chosen: str | None = None
    """Name of the worker whose requests and blocks are shown."""
    shows_requests: bool = True
    shows_map: bool = True
    group: int = 0
    """Group whose blocks the map shows."""
    requests: cache_pb2.WorkerDescription | None = None
    """The chosen worker with its sequences; None: not shown, or not fetched yet."""
    request_rates: dict[SequenceName, float | None] = field(default_factory=dict)
    """Generated tokens per second, by sequence."""
    block_map: BlockMap | None = None
    """Block map of the chosen worker; None: not shown, or not fetched yet."""
    _drawn: _DrawnMap | None = None

    @property
    def workers(self) -> list[cache_pb2.WorkerDescription]:
        """Workers, sorted by name."""
        return [] if self.response is None else sorted(self.response.workers, key=lambda worker: worker.worker_id)

    @property
    def misses_chosen(self) -> bool:
        """Whether the manager lists workers, but not the chosen one."""
        names = [worker.worker_id for worker in self.workers]
        return bool(names) and self.chosen is not None and self.chosen not in names

    def draw_map(self, block_map: BlockMap, width: int, height: int | None) -> Text:
        """Return the drawn block map. It is drawn only once, since that of a large pool takes half a second."""
        drawn = self._drawn
        if drawn is None or not drawn.serves(block_map, width, height):
            drawn = self._drawn = _DrawnMap(block_map, width, height, render_block_map(block_map, width, height))
        return drawn.text


def render(picture: Picture, width: int, height: int | None = None, *, keys: bool = False) -> RenderableType:
    """Draw the whole picture, `width` columns wide and, if `height` is given, at most so many lines high. Workers come first, then
    requests, then blocks."""
    parts: list[RenderableType] = [_head(picture)]
    num_lines = 1
    if picture.away:
        parts.append(Text(printable(picture.away), style="bold red", no_wrap=True, overflow="ellipsis"))
        num_lines += 1
    workers = picture.workers
    if workers:
        parts.append(_table(picture, workers, is_wide=width >= _WIDE))
        num_lines += 1 + len(workers) + (len(workers) > 1)
    elif picture.response is not None:
        parts.append(Text("no live worker; start one with `kvpool worker`"))
        num_lines += 1
    if keys:
        num_lines += 1
    room = None if height is None else height - num_lines
    if picture.misses_chosen and (room is None or room >= 2):
        note = f"{printable(picture.chosen or '')} is not there; ↑ ↓ chooses another worker"
        parts += [Text(), Text(note, style="dim", no_wrap=True, overflow="ellipsis")]
        room = None if room is None else room - 2
    block_map = _map(picture, width, room)
    if picture.requests is not None:
        # Each of the two has an empty line above it.
        num_map_lines = 0 if block_map is None else 1 + block_map.plain.count("\n") + 1
        max_lines = _ROWS_WITHOUT_A_TERMINAL + 3 if room is None else room - num_map_lines - 1
        if max_lines > 0:
            parts += [Text(), render_requests(picture.requests, picture.request_rates, width, max_lines)]
    if block_map is not None:
        parts += [Text(), block_map]
    if keys:
        parts.append(Text(KEYS, style="dim", no_wrap=True))
    return Group(*parts)


def _map(picture: Picture, width: int, room: int | None) -> Text | None:
    """Draw the block map if it fits into the `room` lines below the workers. It gets the lines that the requests leave, but at
    least half of the room, and takes no more than it needs."""
    if picture.block_map is None:
        return None
    if room is None:
        return picture.draw_map(picture.block_map, width, None)
    num_lines = 0 if picture.requests is None else 1 + num_lines_wanted(picture.requests)
    height = max(room - num_lines, room // 2) - 1
    return picture.draw_map(picture.block_map, width, height) if height >= _MAP_LINES_MIN else None


def _head(picture: Picture) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("kvpool", style="bold")
    text.append(f"  manager {printable(picture.manager)}")
    if picture.response is not None:
        running, waiting = _load(picture.workers)
        text.append(
            f", epoch {picture.response.epoch}, {picture.response.num_prefix_nodes:,} prefix nodes, "
            f"{running} requests running, {waiting} waiting"
        )
    return text


def _table(picture: Picture, workers: Sequence[cache_pb2.WorkerDescription], *, is_wide: bool) -> Table:
    bar_cells = _BAR_CELLS if is_wide else _BAR_CELLS_NARROW
    table = Table(box=None, pad_edge=False)
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("state", no_wrap=True)
    table.add_column("blocks", no_wrap=True)
    for column in ("used", "run", "wait", "prompt/s", "gen/s", "hits", *(("evict/s", "lease") if is_wide else ())):
        table.add_column(column, justify="right", no_wrap=True)
    all_counts = [device_counts(worker) for worker in workers]
    for worker, counts in zip(workers, all_counts, strict=True):
        name = Text(printable(worker.worker_id), style="bold" if worker.worker_id == picture.chosen else "")
        figures = _figures(counts, bar_cells, [worker], picture.rates.get(worker.session))
        cells = (name, _state(worker), *figures, f"{worker.lease_remaining_ms / 1000:.1f} s")
        table.add_row(*cells[: len(table.columns)])
    if len(workers) > 1:
        rates = _sum([picture.rates.get(worker.session) for worker in workers])
        cells = (Text("all", style="dim"), Text(), *_figures(sum_counts(all_counts), bar_cells, workers, rates), "")
        table.add_row(*cells[: len(table.columns)])
    return table


def _figures(
    counts: common_pb2.BlockCounts,
    bar_cells: int,
    workers: Sequence[cache_pb2.WorkerDescription],
    rates: Rates | None,
) -> tuple[Text | str, ...]:
    """Return the columns from the blocks on."""
    return (*_blocks(counts, bar_cells), *map(str, _load(workers)), *_rates(rates))


def _load(workers: Sequence[cache_pb2.WorkerDescription]) -> tuple[int, int]:
    """Return the numbers of requests that run and that wait."""
    return sum(worker.load.num_running for worker in workers), sum(worker.load.num_waiting for worker in workers)


def _state(worker: cache_pb2.WorkerDescription) -> Text:
    if worker.recovering:
        return Text("reporting", style="yellow")
    return Text("leaving", style="magenta") if worker.draining else Text("serving", style="green")


def _blocks(counts: common_pb2.BlockCounts, bar_cells: int) -> tuple[Text, str]:
    """Return the bar, and the share of blocks that cannot be granted now."""
    bar = Text()
    num_drawn = 0
    capacity = max(1, counts.capacity)
    for name, sign, style in _BAR:
        count = getattr(counts, name)
        # A single block is seen as well, and the bar never runs over.
        width = min(bar_cells - num_drawn, max(round(count / capacity * bar_cells), 1 if count else 0))
        bar.append(sign * width, style=style)
        num_drawn += width
    bar.append(_FREE[0] * (bar_cells - num_drawn), style=_FREE[1])
    return bar, f"{1 - (counts.free + counts.cached + counts.withheld) / capacity:.0%}"


def _sum(rates: Sequence[Rates | None]) -> Rates | None:
    with_rates = [rate for rate in rates if rate is not None]
    if not with_rates:
        return None
    prompts = sum(rate.prompt_tokens for rate in with_rates)
    cached = sum(rate.prompt_tokens * rate.hit_rate for rate in with_rates if rate.hit_rate is not None)
    return Rates(
        prompt_tokens=prompts,
        generated_tokens=sum(rate.generated_tokens for rate in with_rates),
        evicted_blocks=sum(rate.evicted_blocks for rate in with_rates),
        hit_rate=cached / prompts if prompts else None,
    )


def _rates(rates: Rates | None) -> tuple[str, str, str, str]:
    if rates is None:
        return (_NONE,) * 4
    hits = _NONE if rates.hit_rate is None else f"{rates.hit_rate:.0%}"
    return f"{rates.prompt_tokens:,.0f}", f"{rates.generated_tokens:,.0f}", hits, f"{rates.evicted_blocks:,.0f}"

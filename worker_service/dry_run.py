"""`kvpool worker --dry-run`: the worker's memory plan, without loading the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpool.process.printable import printable

from .model.candidate import find_candidate
from .model.forward.kv_plan import KVCachePlan, show_bytes
from .model.memory.plan import MemoryBudget
from .settings import WorkerSettings

if TYPE_CHECKING:
    from .model.outline import Outline

_LENGTHS = (512, 2048, 8192)
"""Lengths in tokens for which the number of sequences is shown, besides the longest."""


def dry_run(settings: WorkerSettings, console: Console, progress: Callable[[str], None]) -> None:
    """Print the plan that a start with these settings would make now. Raises ModelError where a start would.

    The first line comes after `find_candidate`, in less than a second unless a GPU is asked for; `kvpool up` waits for no more.
    """
    source = find_candidate(settings.model_settings(), progress)
    console.print(Text(printable(str(source))), soft_wrap=True)
    # Here and not above: the import takes seconds.
    from .model.outline import outline_model

    outline = outline_model(source, settings.model_settings())
    console.print(_model_table(outline))
    budget = outline.plan(settings.memory_settings())
    console.print(_memory_table(budget))
    console.print(_kv_cache_table(budget.kv_cache, outline.prepared.max_model_len))


def _model_table(outline: Outline) -> Table:
    from .model.placement import dtype_name

    table = _table("Model", "")
    table.add_row("name", Text(printable(outline.name)))
    table.add_row("architecture", Text(printable(outline.architecture)))
    table.add_row("parameters", f"{outline.meta_model.num_parameters:,}")
    for name, num_bytes in outline.weight_bytes().items():
        chosen = name == dtype_name(outline.prepared.dtype)
        table.add_row(f"weights in {name}", show_bytes(num_bytes) + (" (chosen)" if chosen else ""))
    table.add_row("runtime", outline.runtime)
    table.add_row("longest sequence", f"{outline.prepared.max_model_len:,} tokens")
    if (longest := outline.prepared.max_encoder_tokens) is not None:
        table.add_row("longest input of the encoder", f"{longest:,} tokens")
    return table


def _memory_table(budget: MemoryBudget) -> Table:
    table = _table("Memory", "", "")
    for line in budget.lines():
        table.add_row(line.what, show_bytes(line.num_bytes), line.why)
    return table


def _kv_cache_table(plan: KVCachePlan, max_model_len: int) -> Table:
    table = _table("KV cache", "")
    if plan.has_one_group:
        pool = plan.only_pool
        table.add_row("bytes per token", f"{plan.bytes_per_token:,}")
        table.add_row("bytes per block", f"{pool.bytes_per_block:,} ({plan.block_size} tokens)")
        table.add_row("blocks", f"{pool.num_blocks:,}, {pool.capacity:,} of them usable")
        table.add_row("tokens", f"{pool.capacity * plan.block_size:,}")
    for pool in () if plan.has_one_group else plan.pools():
        tokens = "" if pool.what == "states" else f", {plan.block_size} tokens"
        size = f"{pool.num_blocks:,} of {pool.bytes_per_block:,} bytes{tokens}"
        table.add_row(f"blocks of group {pool.index}, {pool.what}", size)
    if (cross := plan.cross) is not None:
        at_once = cross.capacity / cross.blocks_per_input(plan.block_size)
        table.add_row(f"inputs of {cross.max_tokens:,} tokens", f"{at_once:,.2f} at once")
    for length in sorted({*(length for length in _LENGTHS if length < max_model_len), max_model_len}):
        table.add_row(f"sequences of {length:,} tokens", f"{plan.concurrency(length):,.2f} at once")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title, *columns)
    table.columns[1].justify = "right"
    return table

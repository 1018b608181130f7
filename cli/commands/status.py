"""`kvpool status`: lists live workers and their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.table import Table

from kvpool.client.block_map import num_device_blocks
from kvpool.client.sync_client import SyncClient
from kvpool.v1 import cache_pb2, common_pb2

from ..terminal import PIPED_WIDTH, JsonOption, ManagerOption, client_config, print_json, printed, stdout_console

_COUNTS: Final = [
    field.name for field in common_pb2.BlockCounts.DESCRIPTOR.fields if field.name not in ("tier", "group")
]
_SHOWN: Final = ("free", "cached", "held", "shared", "reserved")


def status(as_json: JsonOption = False, manager: ManagerOption = None) -> None:
    """Live workers and their blocks."""
    config = client_config(manager)
    with SyncClient(config=config) as client:
        response = client.describe()
    if as_json:
        print_json(cluster_object(config.manager, response))
        return
    workers = _by_name(response)
    console = stdout_console()
    console.width = max(console.width, PIPED_WIDTH)  # on a narrow terminal lines wrap, and no name is cut
    if not workers:
        is_new = response.former_lease_remaining_ms > 0
        what = (
            "has just started; its workers report in"
            if is_new
            else "has no live worker; start one with `kvpool worker`"
        )
        console.print(f"manager {config.manager} {what}", markup=False)
        return
    console.print(_table(workers))
    console.print(
        f"manager {config.manager}, epoch {response.epoch}, {response.num_prefix_nodes:,} prefix nodes", markup=False
    )


def _by_name(response: cache_pb2.DescribeResponse) -> list[cache_pb2.WorkerDescription]:
    return sorted(response.workers, key=lambda worker: worker.worker_id)


def cluster_object(manager: str, response: cache_pb2.DescribeResponse) -> dict[str, object]:
    """Return the object that `status --json` prints. The names are part of the interface."""
    return {
        "manager": manager,
        "epoch": response.epoch,
        "num_prefix_nodes": response.num_prefix_nodes,
        "workers": [worker_object(worker) for worker in _by_name(response)],
    }


def worker_object(worker: cache_pb2.WorkerDescription) -> dict[str, object]:
    """Return one worker for `--json`. Counts are blocks of the device tier; `hit_rate` is that of the session, null before its
    first prompt."""
    counts = device_counts(worker)
    return {
        "worker_id": worker.worker_id,
        "address": worker.address,
        "session": f"{worker.session:#x}",  # as in the logs; readers of JSON round such a number
        "lease_remaining_ms": worker.lease_remaining_ms,
        "recovering": worker.recovering,
        "draining": worker.draining,
        "model": worker.model_name,
        "block_size": worker.kv_cache_config.block_size,
        "num_blocks": num_device_blocks(worker),
        **{name: getattr(counts, name) for name in _SHOWN},
        "running": worker.load.num_running,
        "waiting": worker.load.num_waiting,
        "hit_rate": _hit_rate(worker),
    }


def _hit_rate(worker: cache_pb2.WorkerDescription) -> float | None:
    totals = worker.totals
    return totals.num_cached_tokens / totals.num_prompt_tokens if totals.num_prompt_tokens else None


def device_counts(worker: cache_pb2.WorkerDescription) -> common_pb2.BlockCounts:
    """Return the block counts of the device tier, summed over its groups."""
    return sum_counts(counts for counts in worker.counts if counts.tier == common_pb2.TIER_DEVICE)


def sum_counts(counts: Iterable[common_pb2.BlockCounts]) -> common_pb2.BlockCounts:
    """Return the sums of all numbers of blocks."""
    listed = list(counts)
    sums = {name: sum(getattr(each, name) for each in listed) for name in _COUNTS}
    return common_pb2.BlockCounts(tier=common_pb2.TIER_DEVICE, **sums)


def _table(workers: Sequence[cache_pb2.WorkerDescription]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "address", "model"):
        table.add_column(column, overflow="fold")
    for column in ("blocks", *_SHOWN, "running", "waiting", "hit rate"):
        table.add_column(column, justify="right")
    for worker in workers:
        counts = device_counts(worker)
        table.add_row(
            printed(f"{worker.worker_id} (leaving)" if worker.draining else worker.worker_id),
            printed(worker.address),
            printed(worker.model_name),
            f"{num_device_blocks(worker):,} × {worker.kv_cache_config.block_size}",
            *(f"{getattr(counts, name):,}" for name in _SHOWN),
            str(worker.load.num_running),
            str(worker.load.num_waiting),
            "–" if (rate := _hit_rate(worker)) is None else f"{rate:.0%}",
        )
    return table

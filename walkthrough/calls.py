"""A call of a worker to the manager: executed by the core, as its servicer does it, and written in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvpool.cache_service import worker_codec
from kvpool.cache_service.core.manager import CacheManager
from kvpool.protocol.status import reason_of
from kvpool.protocol.tokens import TOKEN_BYTES
from kvpool.v1 import cache_pb2, common_pb2

from .layouts import Layout


def execute(manager: CacheManager, request: Any) -> Any:
    """Return the manager's response to an Allocate, Append, Fork or Free. Raises Refusal if it refuses the whole call."""
    uplink = worker_codec.decode_uplink(request)
    if isinstance(request, cache_pb2.AllocateRequest):
        allocated, reply = manager.allocate(uplink, list(map(worker_codec.decode_allocate_item, request.items)))
        results = map(worker_codec.encode_allocate_outcome, allocated)
        return cache_pb2.AllocateResponse(downlink=worker_codec.encode_downlink(reply), results=results)
    if isinstance(request, cache_pb2.AppendRequest):
        appended, reply = manager.append(uplink, list(map(worker_codec.decode_append_item, request.items)))
        answers = map(worker_codec.encode_append_outcome, appended)
        return cache_pb2.AppendResponse(downlink=worker_codec.encode_downlink(reply), results=answers)
    if isinstance(request, cache_pb2.ForkRequest):
        forked, reply = manager.fork(uplink, list(map(worker_codec.decode_fork_item, request.items)))
        stated = map(worker_codec.encode_fork_outcome, forked)
        return cache_pb2.ForkResponse(downlink=worker_codec.encode_downlink(reply), results=stated)
    reply = manager.free(uplink, worker_codec.decode_free_items(request.items))
    return cache_pb2.FreeResponse(downlink=worker_codec.encode_downlink(reply))


def in_words(request: Any, response: Any, layout: Layout) -> str:
    """Write a call with its answer: a line for each item; what concerns the whole call is in the last one."""
    method = type(request).__name__.removesuffix("Request").lower()
    said = [list(_item(item, layout)) for item in request.items] or [[]]
    answered = [[_result(result, layout)] for result in getattr(response, "results", ())] or [[] for _ in said]
    said[-1] += _uplink(request.uplink)
    answered[-1] += _downlink(response.downlink, layout)
    lines = zip(said, answered, strict=True)
    return "\n".join(f"{method}({', '.join(call)}) → {'; '.join(answer) or 'done'}" for call, answer in lines)


def _item(item: Any, layout: Layout) -> Iterator[str]:
    if isinstance(item, cache_pb2.AllocateItem):
        yield f'"{item.key.sequence_id}"'
        yield f"{len(item.tokens) // TOKEN_BYTES} tokens"
        if item.max_new_tokens > 1:
            yield f"up to {item.max_new_tokens} new"
        return
    update = item.update
    num_tokens = len(update.tokens) // TOKEN_BYTES
    if isinstance(item, cache_pb2.ForkItem):
        yield f'"{update.key.sequence_id}" of "{item.parent.sequence_id}"'
        yield f"{item.num_shared_blocks} blocks shared, {num_tokens} tokens after them"
    else:
        yield f'"{update.key.sequence_id}"'
        if num_tokens:
            yield f"{num_tokens} new token{'s' if num_tokens > 1 else ''}"
    yield f"num_computed_tokens={update.num_computed_tokens}"
    yield from _entries(update.bound, layout)
    yield from (f"block {block} as scratch" for run in update.scratch for block in run.block_ids)
    for run in update.released:
        place = layout[run.group].label.lower()
        yield from (f"block {block} of the {place} released" for block in run.block_ids)


def _entries(runs: Iterable[common_pb2.BlockRun], layout: Layout) -> Iterator[str]:
    for run in runs:
        place = layout[run.group].label.lower()
        yield from (f"block {block} as {place}[{index}]" for index, block in enumerate(run.block_ids, run.start_index))


def _uplink(uplink: cache_pb2.Uplink) -> Iterator[str]:
    wishes = [wish.num_blocks for wish in uplink.reserve_wishes]
    if any(wishes):
        yield f"reserve_wish={wishes[0] if len(wishes) == 1 else tuple(wishes)}"
    for run in uplink.returned:
        yield f"{list(run.block_ids)} of the reserve returned"


def _result(result: Any, layout: Layout) -> str:
    if result.status.code:
        return f"{reason_of(result.status)}: {result.status.message}"
    if not isinstance(result, cache_pb2.AllocateResult):
        return f"{result.num_sealed_tokens} tokens sealed"
    if result.HasField("wait"):
        return f"wait for {result.wait.leader.sequence_id!r} up to position {result.wait.position}"
    granted = result.granted
    full, *others = granted.tables
    scratch = {run.group: list(run.block_ids) for run in granted.scratch}
    parts = [f"table {list(full.block_ids)}", *_entries(others, layout)]
    parts += [f"scratch {scratch.get(run.group, [])}" for run in others]
    parts.append(f"{granted.num_cached_tokens} tokens cached")
    if granted.boundaries:
        parts.append(f"boundaries {', '.join(map(str, granted.boundaries))}")
    return ", ".join(parts)


def _downlink(downlink: cache_pb2.Downlink, layout: Layout) -> Iterator[str]:
    """Describe the grants to the reserves and the orders."""
    for entry in downlink.entries:
        if entry.HasField("grant"):
            of_group = f" of group {entry.grant.group}" if len(layout) > 1 else ""
            yield f"the reserve{of_group} gets {list(entry.grant.block_ids)}"
        elif entry.HasField("boundary"):
            order = entry.boundary
            yield f'downlink: boundary("{order.key.sequence_id}", {order.num_tokens})'

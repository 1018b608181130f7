"""Serves GET /api/block: one block, the prefix before it, its text and the sequences that share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.client import KvpoolError, Model
from kvpool.v1 import cache_pb2

from ..context import gateway_of
from ..errors import api_error, invalid
from .query import query_number

SECONDS: Final = 2.0
"""Time for an answer. It is short, since somebody points at a block and waits."""
MAX_UINT32: Final = 2**32 - 1
MAX_TEXTS: Final = 64
"""Most blocks whose texts are sent: the last ones of the prefix."""


async def block(request: Request) -> Response:
    """Answer with a block, for ?worker_id=…&block_id=…, and &group=… unless it is 0."""
    worker_id = request.query_params.get("worker_id", "")
    if not worker_id:
        raise invalid("worker_id", "worker_id names the worker whose block it is")
    block_id = query_number(request, "block_id", None, least=1, most=MAX_UINT32)
    group = query_number(request, "group", 0, most=MAX_UINT32)
    try:
        client = gateway_of(request).client
        described = await client.describe_block(worker_id, block_id, group=group, timeout=SECONDS)
    except KvpoolError as error:
        raise api_error(error) from error
    return JSONResponse({**_block_json(described), **await _texts(request, worker_id, described)})


def _block_json(described: cache_pb2.DescribeBlockResponse) -> dict[str, Any]:
    block, root = described.block, described.root
    return {
        "epoch": str(described.epoch),
        "group": block.group,
        "block_id": block.block_id,
        "state": cache_pb2.BlockState.Name(block.state).removeprefix("BLOCK_STATE_").lower(),
        "ref_count": block.ref_count,
        "generation": str(block.generation),
        "token_count": block.token_count,
        "sealed": block.sealed,
        "block_hash": str(block.block_hash),
        "table_index": block.table_index,
        "owners": [
            {"sequence_id": owner.sequence_id, "attempt": owner.attempt, "round": owner.round} for owner in block.owners
        ],
        "model_fingerprint": root.model_fingerprint,
        "adapter": root.adapter,
        "salt_number": described.salt_number,
        "num_tokens": len(described.tokens) // 4,
        "prefix_block_ids": list(described.prefix_block_ids),
        "owner_block_ids": list(described.owner_block_ids),
    }


async def _texts(request: Request, worker_id: str, described: cache_pb2.DescribeBlockResponse) -> dict[str, Any]:
    """Return the block's own text, and those of the last blocks of its prefix; null without a tokenizer, or while no worker
    answers."""
    client = gateway_of(request).client
    try:
        workers = (await client.describe(worker_id=worker_id, timeout=SECONDS)).workers
        if not workers or not described.tokens:
            return {"text": None, "texts": []}
        model = await client.model(workers[0].model_fingerprint, timeout=SECONDS)
    except KvpoolError:
        return {"text": None, "texts": []}
    block_size = workers[0].kv_cache_config.block_size
    ids = memoryview(described.tokens).cast("I").tolist()
    cut = [ids[start : start + block_size] for start in range(0, len(ids), block_size)][-MAX_TEXTS:]
    texts = await run_in_threadpool(_decode, model, cut)
    return {"text": texts[-1] if texts else None, "texts": texts}


def _decode(model: Model, blocks: Sequence[Sequence[int]]) -> list[str]:
    if model.tokenizer is None:
        return []
    return model.tokenizer.decode_batch([list(ids) for ids in blocks], skip_special_tokens=False)

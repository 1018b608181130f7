"""The routes of the page: JSON and an event stream below /api."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tokenizers import Tokenizer

from kvpool.client import KvpoolError
from kvpool.v1 import cache_pb2

from .context import gateway_of
from .errors import ApiError, invalid
from .event_stream import EventStream
from .openai.bodies import Body, Messages, plain, read_body
from .openai.errors import openai_error
from .pages.prefix_tree import entries_after

MAX_UINT32: Final = 2**32 - 1
_OF_BLOCK: Final = ("group", "block_id", "ref_count", "token_count", "sealed", "table_index")
_WATCH_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
BLOCK_SECONDS: Final = 2.0
"""Time for an answer about a block. It is short, since somebody points at the block and waits."""
MAX_TEXTS: Final = 64
"""Most blocks whose texts are sent: the last ones of the prefix."""
MAX_ENTRIES: Final = 200
"""Most entries in one level of the tree of prefixes."""


async def watch(request: Request) -> Response:
    """Answer with events `manager`, `picture` and `requests`."""
    return EventStream(gateway_of(request).hub.events(), _WATCH_HEADERS)


async def requests(request: Request) -> Response:
    """Answer with one answer, for ?number=…, or with all kept ones, oldest first and without explanations."""
    log = gateway_of(request).request_log
    if "number" not in request.query_params:
        return JSONResponse({"requests": [record.as_object() for record in log.changed_since(0)]})
    number = _number(request, "number", None, least=1, most=10**15 - 1)
    record = log.find(number)
    if record is None:
        raise ApiError(404, f"answer {number} is not kept; --kept-requests says how many are", code="not_found")
    return JSONResponse(record.as_object() | {"explanation": record.explanation})


class DrainBody(BaseModel):
    """A worker, and the seconds that its running requests may take to end; None: the worker's own setting."""

    model_config = ConfigDict(extra="forbid", strict=True)

    worker_id: str = Field(min_length=1, max_length=1024)
    grace: float | None = Field(default=None, ge=0, le=3600, allow_inf_nan=False)


async def drain(request: Request) -> Response:
    """Let a worker take no new requests, end the running ones and leave. May be repeated."""
    body = await read_body(request, DrainBody)
    session = await gateway_of(request).client.drain(body.worker_id, grace=body.grace)
    return JSONResponse({"session": str(session)})


class ExplainBody(Body):
    """A prompt, as text or token ids, or the messages of a chat."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | Annotated[list[Annotated[int, Field(ge=0, le=MAX_UINT32)]], Field(fail_fast=True)] | None = None
    messages: Messages | None = None
    cache_salt: str | None = Field(default=None, max_length=256)


async def explain(request: Request) -> Response:
    """Answer with why a prompt is not served from the cache and, as `sentences`, the same in words. Raises ApiError."""
    body = await read_body(request, ExplainBody)
    client = gateway_of(request).client
    messages = None if body.messages is None else plain(body.messages)
    try:
        explanation = await client.explain(
            body.prompt, messages=messages, model=body.model, tenant_salt=body.cache_salt or ""
        )
        served = await client.model(explanation.model_fingerprint)
    except KvpoolError as error:
        raise openai_error(error, "prompt" if messages is None else "messages") from error
    return JSONResponse(explanation.as_object() | {"sentences": explanation.sentences(served.tokenizer)})


async def block(request: Request) -> Response:
    """Answer with a block, the prefix before it, its text and the sequences that share it, for ?worker_id=…&block_id=…, and
    &group=… unless it is 0."""
    worker_id = request.query_params.get("worker_id", "")
    if not worker_id:
        raise invalid("worker_id", "worker_id names the worker whose block it is")
    block_id = _number(request, "block_id", None, least=1, most=MAX_UINT32)
    group = _number(request, "group", 0, most=MAX_UINT32)
    client = gateway_of(request).client
    described = await client.describe_block(worker_id, block_id, group=group, timeout=BLOCK_SECONDS)
    texts = await _texts(request, worker_id, described)
    return JSONResponse({**_block_json(described), "text": texts[-1] if texts else None, "texts": texts})


def _block_json(described: cache_pb2.DescribeBlockResponse) -> dict[str, Any]:
    block, root = described.block, described.root
    return {
        **{name: getattr(block, name) for name in _OF_BLOCK},
        "epoch": str(described.epoch),
        "state": cache_pb2.BlockState.Name(block.state).removeprefix("BLOCK_STATE_").lower(),
        "generation": str(block.generation),
        "block_hash": str(block.block_hash),
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


async def _texts(request: Request, worker_id: str, described: cache_pb2.DescribeBlockResponse) -> list[str]:
    """Return the texts of the last blocks of its prefix, the last of which is the block's own; none without a tokenizer, or while
    no worker answers."""
    client = gateway_of(request).client
    try:
        workers = (await client.describe(worker_id=worker_id, timeout=BLOCK_SECONDS)).workers
        if not workers or not described.tokens:
            return []
        tokenizer = (await client.model(workers[0].model_fingerprint, timeout=BLOCK_SECONDS)).tokenizer
    except KvpoolError:
        return []
    if tokenizer is None:
        return []
    block_size = workers[0].kv_cache_config.block_size
    ids = memoryview(described.tokens).cast("I").tolist()
    cut = [ids[start : start + block_size] for start in range(0, len(ids), block_size)][-MAX_TEXTS:]
    texts: list[str] = await run_in_threadpool(tokenizer.decode_batch, cut, skip_special_tokens=False)
    return texts


async def prefixes(request: Request) -> Response:
    """Answer with the cached prefixes as a tree, a level at a time: the entries after `node` (0: the beginnings), at most `limit`.
    Raises ApiError."""
    number = _number(request, "node", 0, most=2**63)
    limit = _number(request, "limit", 50, most=MAX_ENTRIES)
    gateway = gateway_of(request)
    view = await gateway.prefixes.look()
    if not view.is_complete:
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the manager has not listed what it holds yet: ask again",
            code="unavailable",
        )
    node = view.nodes.get(number)
    is_gone = bool(number) and node is None
    entries, total = ([], 0) if is_gone else entries_after(view, node, limit)
    num_nodes = len(view.nodes)
    tokenizers: dict[str, Tokenizer | None] = {}
    for fingerprint in {entry.fingerprint for entry in entries}:
        try:
            tokenizers[fingerprint] = (await gateway.client.model(fingerprint)).tokenizer
        except KvpoolError:
            tokenizers[fingerprint] = None  # no worker serves it now
    listed = [entry.as_object(tokenizers[entry.fingerprint]) for entry in entries]
    return JSONResponse({"num_nodes": num_nodes, "is_gone": is_gone, "total": total, "entries": listed})


def _number(request: Request, name: str, default: int | None, *, least: int = 0, most: int) -> int:
    """Return the parameter of that name. Raises ApiError if it is no number from `least` to `most`, or is missing without a
    `default`."""
    given = request.query_params.get(name, "" if default is None else str(default))
    if given.isascii() and given.isdigit() and len(given) < 20 and least <= int(given) <= most:
        return int(given)
    raise invalid(name, f"{name}: needed {least} to {most}, got {given[:32]!r}")

"""Serves GET /api/prefixes: the cached prefixes as a tree, a level at a time."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from tokenizers import Tokenizer

from kvpool.client import Client, KvpoolError

from ..context import gateway_of
from ..errors import ApiError
from .page import page_of
from .prefix_tree import PrefixEntry, beginning_of, entries_after
from .query import query_number

MAX_ENTRIES: Final = 200


async def prefixes(request: Request) -> JSONResponse:
    """Answer with the entries after `node` (0: the beginnings), at most `limit`. Raises ApiError."""
    number = query_number(request, "node", 0, most=2**63)
    limit = query_number(request, "limit", 50, most=MAX_ENTRIES)
    view = await page_of(request).prefixes.look()
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
    tokenizers = await _tokenizers(entries, gateway_of(request).client)
    return JSONResponse(
        {
            "num_nodes": num_nodes,
            "is_gone": is_gone,
            "total": total,
            "entries": [_encode(entry, tokenizers) for entry in entries],
        }
    )


async def _tokenizers(entries: Iterable[PrefixEntry], client: Client) -> dict[str, Tokenizer | None]:
    """Return the tokenizers by model; None: it has none, or no worker serves it now."""
    tokenizers: dict[str, Tokenizer | None] = {}
    for fingerprint in set(map(_fingerprint, entries)):
        try:
            tokenizers[fingerprint] = (await client.model(fingerprint)).tokenizer
        except KvpoolError:
            tokenizers[fingerprint] = None
    return tokenizers


def _fingerprint(entry: PrefixEntry) -> str:
    root = beginning_of(entry.first).root
    return "" if root is None else root.model_fingerprint


def _encode(entry: PrefixEntry, tokenizers: Mapping[str, Tokenizer | None]) -> dict[str, Any]:
    return {
        "node": str(entry.last.node),
        "text": _text(entry, tokenizers.get(_fingerprint(entry))),
        "num_blocks": entry.num_blocks,
        "num_tokens": entry.num_blocks * (len(entry.first.tokens) // 4),
        "num_saved_tokens": entry.first.num_served_tokens,
        "workers": sorted(entry.first.sessions.values()),
        "num_children": len(entry.last.children),
        "salt_number": beginning_of(entry.first).salt_number,
    }


def _text(entry: PrefixEntry, tokenizer: Tokenizer | None) -> str | None:
    """Return the beginning of the entry's text; None: there is no tokenizer."""
    if tokenizer is None:
        return None
    ids = array.array("I")
    ids.frombytes(entry.tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    text: str = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return text

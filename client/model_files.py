"""Receives a model's facts and files from a worker, and checks the files against their digests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Final

from kvpool.v1 import worker_pb2

from .errors import ProtocolError

DEFAULT_MAX_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of all files of a model together. The largest published tokenizers have some 35 MB."""
MAX_FILES: Final = 16


async def receive_model(
    messages: AsyncIterator[worker_pb2.GetModelResponse],
    who: str,
    *,
    facts_timeout: float,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> tuple[worker_pb2.ModelFacts, dict[int, bytes]]:
    """Read one GetModel answer to its end. ProtocolError if a file is missing or not what its digest says, or if the files
    announced have more than `max_bytes` together; then none of them is received.

    TimeoutError if the first message is not there within `facts_timeout` seconds; how long the files may take is up to
    the call.
    """
    async with asyncio.timeout(facts_timeout):
        facts = await _receive_facts(messages, who)
    sizes = _announced_sizes(facts, who, max_bytes)
    contents = {file: bytearray() for file in sizes}
    async for message in messages:
        part = message.part
        content = contents.get(part.file)
        if content is None or part.offset_bytes != len(content):
            raise ProtocolError(
                f"{who} sent a part of file {part.file} at byte {part.offset_bytes} that does not join on",
                reason="BAD_MODEL_FILE",
            )
        if len(content) + len(part.data) > sizes[part.file]:
            raise ProtocolError(
                f"{who} sent more than the {sizes[part.file]} bytes announced for file {part.file}",
                reason="BAD_MODEL_FILE",
            )
        content += part.data
    for file in facts.files:
        digest = hashlib.sha256(contents[file.file]).digest()
        if digest != file.digest:
            raise ProtocolError(
                f"file {worker_pb2.ModelFile.Name(file.file)} from {who} has the SHA-256 {digest.hex()[:16]}…, "
                f"announced was {file.digest.hex()[:16]}…; restart the worker, its model folder may have changed",
                reason="DIGEST_MISMATCH",
            )
    return facts, {file: bytes(content) for file, content in contents.items()}


async def _receive_facts(messages: AsyncIterator[worker_pb2.GetModelResponse], who: str) -> worker_pb2.ModelFacts:
    message = await anext(messages, None)
    if message is None:
        raise ProtocolError(f"{who} ended before it named its model", reason="BAD_MODEL_FILE")
    if message.WhichOneof("message") != "facts":
        raise ProtocolError(f"{who} did not begin with the facts of its model", reason="BAD_MODEL_FILE")
    return message.facts


def _announced_sizes(facts: worker_pb2.ModelFacts, who: str, max_bytes: int) -> dict[int, int]:
    sizes = {int(file.file): file.size_bytes for file in facts.files}
    if len(facts.files) > MAX_FILES:
        raise ProtocolError(
            f"{who} announced {len(facts.files)} files, at most {MAX_FILES} are received", reason="BAD_MODEL_FILE"
        )
    if len(sizes) != len(facts.files):
        raise ProtocolError(f"{who} announced {len(facts.files)} files, some twice", reason="BAD_MODEL_FILE")
    total = sum(sizes.values())
    if total > max_bytes:
        raise ProtocolError(
            f"{who} announced files of {total} bytes in all for {facts.model_name!r}, at most {max_bytes} are received; raise "
            "max_model_bytes of ClientConfig (KVPOOL_CLIENT_MAX_MODEL_BYTES for the command line) if the model is to be trusted",
            reason="MODEL_TOO_LARGE",
        )
    return sizes

"""Fetches a model's facts and files from a worker, and believes only what matches its digest."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Final

from kvpool.v1 import worker_pb2

from .errors import ProtocolError

MAX_FILE_BYTES: Final = 256 * 1024 * 1024
MAX_FILES: Final = 16


async def receive_model(
    messages: AsyncIterator[worker_pb2.GetModelResponse], who: str, *, facts_timeout: float
) -> tuple[worker_pb2.ModelFacts, dict[int, bytes]]:
    """Read one GetModel answer to its end. ProtocolError if a file is missing, too large or not what its digest says.

    TimeoutError if the first message is not there within `facts_timeout` seconds; how long the files may take is up to
    the call.
    """
    async with asyncio.timeout(facts_timeout):
        facts = await _receive_facts(messages, who)
    sizes = _announced_sizes(facts, who)
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


def _announced_sizes(facts: worker_pb2.ModelFacts, who: str) -> dict[int, int]:
    sizes = {int(file.file): file.size_bytes for file in facts.files}
    if len(facts.files) > MAX_FILES or len(sizes) != len(facts.files):
        raise ProtocolError(f"{who} announced {len(facts.files)} files, some twice", reason="BAD_MODEL_FILE")
    for file, size_bytes in sizes.items():
        if size_bytes > MAX_FILE_BYTES:
            raise ProtocolError(
                f"{who} announced {size_bytes} bytes for file {file}, at most {MAX_FILE_BYTES} are taken",
                reason="BAD_MODEL_FILE",
            )
    return sizes

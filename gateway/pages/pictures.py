"""The manager's pictures as one stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, TypeAlias

from kvpool.client import Client, KvpoolError, ManagerAway
from kvpool.v1 import cache_pb2

PICTURE_MS: Final = 200
"""Interval of the manager's pictures. Browsers may ask for fewer, and get no more."""
MAX_SEQUENCES: Final = 200
"""Sequences of each worker in a picture."""

Pictures: TypeAlias = Callable[[], AsyncGenerator[cache_pb2.Picture, None]]
"""Opens a stream of pictures that begins with a whole one. Raises ConnectionError when the manager is away."""


def manager_pictures(client: Client) -> Pictures:
    """Return the pictures of the client's manager."""

    async def pictures() -> AsyncGenerator[cache_pb2.Picture, None]:
        watching = client.watch(interval=PICTURE_MS / 1000, blocks=True, max_sequences=MAX_SEQUENCES)
        try:
            async with aclosing(watching) as updates:
                async for update in updates:
                    if isinstance(update, ManagerAway):
                        raise update.error
                    if isinstance(update, cache_pb2.Picture):
                        yield update
        except KvpoolError as error:
            # Includes errors that trying again does not cure, e.g. a manager that is too old: somebody may replace it.
            raise ConnectionError(error.message) from error

    return pictures

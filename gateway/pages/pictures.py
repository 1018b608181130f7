"""The manager's pictures as one stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Final, TypeAlias

import grpc.aio

from kvpool.v1 import cache_pb2, cache_pb2_grpc

PICTURE_MS: Final = 200
"""Between two pictures of the manager. Browsers may want fewer, and get no more."""
MAX_SEQUENCES: Final = 200
"""Of each worker."""

Pictures: TypeAlias = Callable[[], AsyncGenerator[cache_pb2.Picture, None]]
"""Opens a stream of pictures, which begins with a whole one. It ends, or raises ConnectionError, when the manager is away."""


def manager_pictures(manager: cache_pb2_grpc.CacheServiceStub) -> Pictures:
    """The pictures of this manager."""

    async def pictures() -> AsyncGenerator[cache_pb2.Picture, None]:
        options = cache_pb2.PictureOptions(interval_ms=PICTURE_MS, include_blocks=True, max_sequences=MAX_SEQUENCES)
        call = manager.Watch(cache_pb2.WatchRequest(picture=options))
        try:
            async for response in call:
                if response.HasField("picture"):
                    yield response.picture
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(error.details() or error.code().name) from error
        finally:
            call.cancel()

    return pictures

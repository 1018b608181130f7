"""Watches a cluster: a stream of the manager that is opened again when the manager restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

import grpc.aio

from kvpool.v1 import cache_pb2

from .channels import Channels
from .config import ClientConfig
from .errors import DeadlineExceeded, KvpoolError, ResourceExhausted, Unavailable, from_rpc_error

_SILENCE_SECONDS: Final = 6.0
"""The manager sends a message every 2 s. If it is silent for so long, it is frozen or cut off."""
_BACKOFF_SECONDS_MIN: Final = 0.1
_BACKOFF_SECONDS_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class ManagerAway:
    """The stream was lost. It is opened again, until the reader closes it; the next picture is a whole one."""

    error: KvpoolError
    """Why the stream was lost: the manager restarts, is frozen, or cannot be reached."""


WatchUpdate = cache_pb2.Picture | cache_pb2.Contents | ManagerAway
"""An item that Client.watch yields; see PictureView, and protos/kvpool/v1/cache.proto for the fields."""


class Watch:
    """Opens the stream again and again, each time from where it broke."""

    def __init__(self, channels: Channels, config: ClientConfig, request: cache_pb2.WatchRequest) -> None:
        self._channels = channels
        self._config = config
        self._request = request
        self._silence = max(_SILENCE_SECONDS, 3 * request.picture.interval_ms / 1000)
        self._epoch = 0
        self._after = 0
        self._is_between_wholes = True
        """Whether the received contents are complete up to `_after`."""

    async def updates(self) -> AsyncGenerator[WatchUpdate, None]:
        """Yield updates until the reader closes the generator. Raises KvpoolError only for errors that trying again cannot cure."""
        backoff = _BACKOFF_SECONDS_MIN
        while True:
            if self._request.HasField("contents"):
                resume = (self._epoch, self._after) if self._is_between_wholes else (0, 0)
                self._request.contents.epoch, self._request.contents.after = resume
            call = self._channels.manager(self._config.manager).Watch(self._request)
            try:
                while (message := await self._read(call)) is not None:
                    backoff = _BACKOFF_SECONDS_MIN
                    kind = message.WhichOneof("message")
                    if kind == "picture":
                        yield message.picture
                    elif kind == "contents":
                        self._note(message.contents)
                        yield message.contents
                continue  # it is as old as a connection may be
            except KvpoolError as error:
                if not isinstance(error, Unavailable | DeadlineExceeded | ResourceExhausted):
                    raise
                away = error
            finally:
                call.cancel()
            yield ManagerAway(away)
            await asyncio.sleep(max(backoff, away.retry_after or 0.0))
            backoff = min(2 * backoff, _BACKOFF_SECONDS_MAX)

    async def _read(
        self, call: grpc.aio.UnaryStreamCall[cache_pb2.WatchRequest, cache_pb2.WatchResponse]
    ) -> cache_pb2.WatchResponse | None:
        """Wait for the next message; None at the end. Raises KvpoolError."""
        who = f"the manager at {self._config.manager}"
        try:
            async with asyncio.timeout(self._silence):
                message = await call.read()
        except TimeoutError:
            raise Unavailable(f"{who} has said nothing for {self._silence:g} s", reason="SILENT") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, who) from error
        return message if isinstance(message, cache_pb2.WatchResponse) else None

    def _note(self, contents: cache_pb2.Contents) -> None:
        """Remember where to resume. A whole state that was cut off cannot be resumed."""
        self._epoch = contents.epoch
        if contents.whole_begins:
            self._is_between_wholes = False
        if contents.events:
            self._after = contents.events[-1].number
        if contents.whole_ends:
            self._is_between_wholes = True

"""A manager's pictures, sent when the test says so, and what a browser makes of the events of /api/watch."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np

from kvpool.client import ManagerAway, Unavailable
from kvpool.client.watch import WatchUpdate
from kvpool.v1 import cache_pb2, common_pb2

COLUMNS = {"states": "u1", "ref_counts": "<u2", "last_used": "<u4", "salt_numbers": "<u2"}


class ScriptedPictures:
    """`open` is what the hub follows."""

    def __init__(self) -> None:
        self.num_opened = 0
        self.num_open = 0
        self._next: asyncio.Queue[WatchUpdate] = asyncio.Queue()

    def send(self, *pictures: cache_pb2.Picture) -> None:
        """To the stream that is open, or the one that is opened next."""
        for picture in pictures:
            self._next.put_nowait(picture)

    def lose(self) -> None:
        self._next.put_nowait(ManagerAway(Unavailable("the manager is away")))

    async def open(self) -> AsyncGenerator[WatchUpdate, None]:
        self.num_opened += 1
        self.num_open += 1
        try:
            while True:
                yield await self._next.get()
        finally:
            self.num_open -= 1


Block = tuple[int, int, int, int]
"""State, ref count, last used, salt number."""


def blocks_picture(blocks: Mapping[int, Block]) -> cache_pb2.BlockPicture:
    """These blocks, named one by one."""
    ids = sorted(blocks)
    columns: list[Any] = [[blocks[block][column] for block in ids] for column in range(4)]
    return cache_pb2.BlockPicture(
        group=0,
        tier=common_pb2.TIER_DEVICE,
        block_ids=ids,
        states=bytes(columns[0]),
        ref_counts=np.array(columns[1], "<u2").tobytes(),
        last_used=np.array(columns[2], "<u4").tobytes(),
        salt_numbers=np.array(columns[3], "<u2").tobytes(),
    )


def one_worker(number: int, blocks: Mapping[int, Block], *, whole: bool, session: int = 1) -> cache_pb2.Picture:
    """A complete picture in which this worker's blocks have changed."""
    worker = cache_pb2.WorkerPicture(session=session, blocks=[blocks_picture(blocks)])
    if whole:
        worker.worker.worker_id = f"worker-{session}"
    return cache_pb2.Picture(epoch=7, number=number, whole=whole, complete=True, workers=[worker])


class BrowserMirror:
    """Applies events; `workers` is then what the page shows."""

    def __init__(self) -> None:
        self.manager: list[str] = []
        """States of the manager, in the order in which they came."""
        self.numbers: list[int] = []
        """Of the pictures."""
        self.wholes = 0
        self.workers: dict[str, dict[str, Any]] = {}

    def take(self, event: bytes) -> None:
        if event.startswith(b":"):
            return
        head, data = event.decode().removesuffix("\n\n").split("\n")
        message = json.loads(data.removeprefix("data: "))
        if head == "event: manager":
            self.manager.append(message["state"])
        else:
            assert head == "event: picture"
            self._picture(message)

    def _picture(self, picture: dict[str, Any]) -> None:
        self.numbers.append(int(picture["number"]))
        if picture["whole"]:
            self.wholes += 1
            self.workers.clear()
        for session in picture["ended_sessions"]:
            self.workers.pop(session, None)
        for change in picture["workers"]:
            worker = self.workers.setdefault(change["session"], {"blocks": {}, "sequences": {}, "worker": None})
            worker["worker"] = change.get("worker", worker["worker"])
            for blocks in change.get("blocks", ()):
                self._blocks(worker["blocks"].setdefault(blocks["group"], {}), blocks)
            for sequence in change.get("ended_sequences", ()):
                worker["sequences"].pop(sequence["sequence_id"], None)
            for sequence in change.get("sequences", ()):
                worker["sequences"][sequence["sequence_id"]] = sequence["num_tokens"]

    def _blocks(self, known: dict[int, tuple[int, ...]], blocks: dict[str, Any]) -> None:
        columns = [np.frombuffer(base64.b64decode(blocks[name]), kind).tolist() for name, kind in COLUMNS.items()]
        if blocks["ids"] is None:
            ids = range(blocks["first"], blocks["first"] + len(columns[0]))
        else:
            ids = np.frombuffer(base64.b64decode(blocks["ids"]), "<u4").tolist()
        known.update(zip(ids, zip(*columns, strict=True), strict=True))

"""What a browser makes of the events of /api/watch."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

COLUMNS = {"states": "u1", "ref_counts": "<u2", "last_used": "<u4", "salt_numbers": "<u2"}


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

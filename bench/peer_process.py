"""Our end of the pipe to transformers' continuous batching, which runs as a process of its own: bench.transformers_peer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

MAX_LINE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """How its continuous batching is set up. Both decide how much it computes: attention is over all of a batch by all of it."""

    page_size: int
    max_batch_tokens: int | None
    """None: its own choice."""


PEERS: Final = {
    # What it does if it is told nothing but the size of its cache.
    "defaults": PeerSettings(256, None),
    # The best of those tried for these requests: small batches, in which later prompts find the pages of earlier ones.
    "tuned": PeerSettings(64, 600),
}


class PeerBatch(NamedTuple):
    """What one batch took, as measured in the peer's own process."""

    seconds: float
    cpu_seconds: float


class TransformersPeer:
    """The peer's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, folder: str, settings: PeerSettings, num_cache_tokens: int, environment: Mapping[str, str]
    ) -> TransformersPeer:
        """Start it and wait until its model is loaded."""
        arguments = ["--page-size", str(settings.page_size), "--num-tokens", str(num_cache_tokens)]
        if settings.max_batch_tokens is not None:
            arguments += ["--max-batch-tokens", str(settings.max_batch_tokens)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.transformers_peer", folder, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **environment},
            limit=MAX_LINE_BYTES,
        )
        peer = cls(process)
        await peer._read()
        return peer

    async def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> PeerBatch:
        """Run a batch."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_new_tokens": max_new_tokens}).encode() + b"\n")
        answer = await self._read()
        if answer["num_tokens"] != [max_new_tokens] * len(prompts):
            raise RuntimeError(f"the peer generated {answer['num_tokens']} tokens")
        return PeerBatch(answer["seconds"], answer["cpu_seconds"])

    async def _read(self) -> Any:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer ended; run `python -m bench.transformers_peer` by hand to see why")
        return json.loads(line)

    async def stop(self) -> None:
        """End its process."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

"""docs/images: the block map and a step of a walkthrough as SVG, as the commands print them. Every run gives the same files."""

from __future__ import annotations

import asyncio
import io
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import grpc
from rich.console import Console, Group
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from bench.registration import register_request
from kvpool.cli.launch.cluster import free_port
from kvpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2
from kvpool.walkthrough import prefix
from kvpool.walkthrough.picture import draw_legend, draw_step
from kvpool.walkthrough.recording import record

BLOCKS_COMMAND: Final = "kvpool blocks"
WALKTHROUGH_COMMAND: Final = "kvpool walkthrough prefix"
_STEP: Final = 2
"""A second chat reuses the blocks of the first one's system prompt."""
_WIDTH: Final = 80
_BLOCK_SIZE: Final = 16
_NUM_BLOCKS: Final = 257
_SYSTEM: Final = tuple(range(600))
_CHATS: Final = {"chat-a": 230, "chat-b": 90, "chat-c": 400, "chat-d": 150}
"""Tokens of each chat after the system prompt."""
_FREED: Final = "chat-b"
_SECONDS: Final = 60.0


def pictures() -> dict[str, str]:
    """File names below docs/images, and the pictures."""
    return {
        "blocks.svg": _svg(BLOCKS_COMMAND, Text.from_ansi(_blocks())),
        "walkthrough.svg": _svg(WALKTHROUGH_COMMAND, _step()),
    }


def _svg(title: str, content: Text | Group) -> str:
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), color_system="truecolor")
    console.print(content, no_wrap=True)
    # The fonts of another site are left out: a reader's own monospace font does.
    return re.sub(r"@font-face {.*?}\s*", "", console.export_svg(title=title, theme=DIMMED_MONOKAI), flags=re.DOTALL)


def _step() -> Group:
    """The step as on a terminal of this width."""
    steps = record(prefix.STORY)
    return Group(*draw_step(prefix.STORY, steps, _STEP, _WIDTH), Text(), *draw_legend(prefix.STORY, _WIDTH))


def _blocks() -> str:
    """What `kvpool blocks` prints of a manager whose one worker serves the chats."""
    with _manager() as address:
        asyncio.run(_serve_chats(address))
        command = [sys.executable, "-m", "kvpool.cli", "blocks", "--manager", address]
        return subprocess.run(command, env=_environment(), check=True, capture_output=True, text=True).stdout


def _environment() -> dict[str, str]:
    """A terminal with colours and this width, and no setting of kvpool."""
    kept = {name: value for name, value in os.environ.items() if not re.match("KVPOOL_|NO_COLOR|COLORTERM", name)}
    return {**kept, "COLUMNS": str(_WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color"}


@contextmanager
def _manager() -> Iterator[str]:
    """A manager of its own; its address."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvpool.cache_service", "--port", str(port), "--state-dir", folder]
        # No KeepAlive is sent, and the machine may be busy.
        command += ["--lease-seconds", "3600", "--log-level", "warning"]
        process = subprocess.Popen(command, env=_environment())
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(_SECONDS)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(_SECONDS)


async def _serve_chats(address: str) -> None:
    """As a worker: grants for all chats, the first one's prompt computed before the others come; one chat ends."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        hello = register_request("worker-0", 1, _BLOCK_SIZE, _NUM_BLOCKS)
        session = await stub.Register(hello, timeout=_SECONDS)
        call_no = 0

        def uplink(reserve: int = 0) -> cache_pb2.Uplink:
            nonlocal call_no
            call_no += 1
            wish = cache_pb2.ReserveWish(tier=common_pb2.TIER_DEVICE, num_blocks=reserve)
            return cache_pb2.Uplink(
                session=session.session, session_key=session.session_key, call_no=call_no, reserve_wishes=[wish]
            )

        for first, (name, num_tokens) in enumerate(_CHATS.items(), start=1):
            key = common_pb2.SequenceKey(sequence_id=name, attempt=1)
            tokens = (*_SYSTEM, *range(1000 * first, 1000 * first + num_tokens))
            item = cache_pb2.AllocateItem(
                key=key,
                root=common_pb2.Root(model_fingerprint=hello.model_fingerprint),
                tokens=_packed(tokens),
                max_new_tokens=64,
            )
            await stub.Allocate(cache_pb2.AllocateRequest(uplink=uplink(), items=[item]), timeout=_SECONDS)
            update = cache_pb2.SequenceUpdate(key=key, num_computed_tokens=len(tokens))
            await stub.Append(
                cache_pb2.AppendRequest(uplink=uplink(), items=[cache_pb2.AppendItem(update=update)]), timeout=_SECONDS
            )
        ended = cache_pb2.SequenceUpdate(key=common_pb2.SequenceKey(sequence_id=_FREED, attempt=1))
        await stub.Free(
            cache_pb2.FreeRequest(uplink=uplink(reserve=8), items=[cache_pb2.FreeItem(update=ended)]), timeout=_SECONDS
        )


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)

"""A reader that stays and takes nothing: its answers end, and their blocks are free."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from kvpool.process.address import listen
from tests.cluster.in_process import in_process_cluster
from tests.cluster.polling import eventually
from tests.gateway.conftest import make_chat_model
from tests.gateway.serving import http_client, serving

pytestmark = pytest.mark.slow


def listen_with_small_buffers(host: str, port: int, backlog: int) -> socket.socket:
    """What is sent and not taken fills them soon: some megabytes have to be computed otherwise."""
    listening = listen(host, port, backlog=backlog)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of each connection too
    return listening


async def test_a_reader_that_takes_nothing_loses_its_answers_and_no_other_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket's buffers are full; a second reader, who reads, gets all."""
    monkeypatch.setattr("kvpool.gateway.server.listen", listen_with_small_buffers)
    make_chat_model(tmp_path / "model")
    async with (
        in_process_cluster(tmp_path / "model", tmp_path, num_blocks=1025, max_num_seqs=64) as cluster,
        serving(f"127.0.0.1:{cluster.manager.port}", reader_seconds=0.3) as gateway,
        http_client(gateway.url) as client,
    ):
        body = json.dumps(
            {"prompt": "abc", "max_tokens": 400, "n": 8, "ignore_eos": True, "logprobs": 20, "stream": True}
        ).encode()
        sleeper = socket.socket()
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sleeper.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sleeper, ("127.0.0.1", gateway.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(sleeper, head.encode() + body)

        async def is_ended() -> bool:
            return 'connections_ended_total{limit="reader"} 1.0' in (await client.get("/metrics")).text

        own = await cluster.complete("abc", max_tokens=8)
        assert len(own.token_ids) == 8
        await eventually(is_ended, "the reader's connection is closed")
        await cluster.until_idle()
        assert (await client.get("/load")).json() == {"server_load": 0}
        sleeper.close()

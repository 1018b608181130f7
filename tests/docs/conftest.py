"""For tests of documents: the manager of docs/PROTOCOL.md."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.cli.launch.cluster import free_port
from tests.docs.blocks import ROOT
from tests.docs.protocol_shell import FENCED, TEXT, ProtocolShell


@pytest.fixture
def protocol_shell(tmp_path: Path) -> Iterator[ProtocolShell]:
    """A shell next to the manager of the document, which has no workers and a port of its own."""
    shell = ProtocolShell(free_port(), tmp_path)
    (command,) = [text for text in re.findall(r"^```sh\n(.*?)^```$", TEXT, FENCED) if "kvpool manager" in text]
    process = subprocess.Popen(
        ["bash", "-c", f"exec {shell.here(command)}"],
        cwd=ROOT, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while True:
            assert process.poll() is None, process.communicate()[1]
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", shell.port)) == 0:
                    break
            assert time.monotonic() < end, "the manager does not listen"
            time.sleep(0.05)
        yield shell
    finally:
        process.kill()
        process.communicate()

"""`kvpool bench serve`: what it refuses before it talks to anybody, what it says when nobody is there, what it asks for."""

from __future__ import annotations

import json

import pytest

from tests.client.commands import exit_status, kvpool
from tests.client.fakes import FakeWorker, fake_cluster

BENCH_SERVE = ("bench", "serve", "--manager", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--users", "2", "--rate", "3"], "give one of them"),
        (["--max-in-flight", "3"], "give --rate too"),
        (["--arrivals", "constant"], "give --rate too"),
        (["--rate", "0"], "the rate must be above 0 and at most 100000, got 0.0"),
        (["--workload", "unshared", "--prefix-tokens", "4"], "--prefix-tokens must be 0, got 4"),
        (["--workload", "mixed", "--turns", "2"], "use --workload chats"),
        (["--timeout", "-1"], "timeout must be in"),
        (["--priority", "2147483648"], "priority must be an integer in"),
        (["--tenant", "x" * 257], "tenant must be at most 256 bytes"),
        ([], "no manager answers at 127.0.0.1"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status([*BENCH_SERVE, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("kvpool: ")]
    assert wanted in line


@pytest.mark.parametrize(
    "arguments", [["--users", "0"], ["--workload", "nothing"], ["--repetitions", "0"], ["--generated-tokens", "many"]]
)
def test_what_is_no_option_s_value_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status([*BENCH_SERVE, *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


async def test_all_its_requests_are_of_the_priority_and_the_tenant(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the warm-up too."""
    worker = FakeWorker("w")
    flags = ["--workload", "unshared", "--requests", "2", "--own-tokens", "4", "--generated-tokens", "3", "--json"]
    async with fake_cluster(worker) as manager:
        blue = ["--manager", manager.address, "--priority", "-3", "--tenant", "blue"]
        assert await kvpool(*BENCH_SERVE, *flags, *blue) == 0
    assert json.loads(capsys.readouterr().out)
    assert [(request.priority, request.tenant) for request in worker.requests] == [(-3, "blue")] * 4

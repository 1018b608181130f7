"""`kvpool bench serve` against a real cluster: counts, hit rates, and what it says when the cluster dies."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.client.commands import kvpool, start_kvpool
from tests.cluster.cluster import Cluster
from tests.cluster.models import make_endless_model
from tests.until import eventually

ROOMY = "roomy"
"""A llama with a tokenizer of one token per character, over 1,024 blocks."""
SLOW = "slow"
"""Another model, on a slow device: a stream lasts as long as it has tokens, however fast the machine is."""


class Command:
    """`kvpool bench serve` on a cluster."""

    def __init__(self, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
        self._arguments = ("bench", "serve", "--manager", cluster.address())
        self._capsys = capsys

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        """As a process of its own, which can be interrupted."""
        return await start_kvpool(*self._arguments, *arguments)

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run it to its end in this process: status, stdout, stderr."""
        self._capsys.readouterr()
        status = await kvpool(*self._arguments, *arguments)
        return (status, *self._capsys.readouterr())

    async def measured(self, model: str, *arguments: str) -> Any:
        """Its JSON, after a good end."""
        status, out, err = await self.run("--model", model, "--json", *arguments)
        assert status == 0, err
        found = json.loads(out)
        assert found["error"] is None
        assert found["model"] == model
        return found["cases"]


@pytest.fixture
def command(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(cluster, capsys)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two workers, each with a model of its own: what is to be measured has to be named. In the end every law holds."""
    folder = tmp_path_factory.mktemp("bench")
    roomy = make_endless_model(folder / ROOMY, tokenizer=True)
    slow = make_endless_model(folder / SLOW, architecture="olmo2", tokenizer=True)
    async with Cluster(folder, lease_seconds=1.0, keep_alive_seconds=0.2) as cluster:
        await cluster.start(
            {
                ROOMY: {"model": roomy.path, "block_size": 4, "num_blocks": 1025},
                SLOW: {"model": slow.path, "block_size": 4, "num_blocks": 4097, "step_seconds": 0.01},
            }
        )
        yield cluster
        await cluster.until_clean()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_shared_prefixes_are_computed_once(command: Command) -> None:
    arguments = (
        "--workload shared --requests 5 --prefix-tokens 32 --own-tokens 6 --generated-tokens 5 --repetitions 2 --warm"
    )
    cases = await command.measured(ROOMY, *arguments.split())
    for run in cases["cold"]["runs"]:
        assert (run["num_complete"], run["num_prompt_tokens"], run["num_generated_tokens"]) == (5, 5 * 38, 25)
        # The first one computes the prefix, the other four wait for it.
        assert run["num_cached_tokens"] == 4 * 32
    for run in cases["warm"]["runs"]:
        # All full blocks of 37 tokens: the last token of a prompt is always computed.
        assert run["num_cached_tokens"] == 5 * 36
    assert len(cases["cold"]["runs"]) == len(cases["warm"]["runs"]) == 2
    assert cases["cold"]["time_to_first_token"]["count"] == cases["cold"]["end_to_end"]["count"] == 10
    # One for each token behind the first delivery, which holds two tokens where the client was behind.
    assert 0 < cases["cold"]["inter_token"]["count"] <= 2 * 5 * 4


OPEN_LOOP = "--rate 200 --arrivals constant --max-in-flight 2"


@pytest.mark.parametrize(
    ("arguments", "expected", "turns"),
    [
        (
            f"--workload unshared --requests 6 --own-tokens 21 --generated-tokens 3 {OPEN_LOOP}",
            {"num_complete": 6, "num_cached_tokens": 0, "num_generated_tokens": 18},
            [],
        ),
        (
            "--workload document --requests 3 --users 1 --prefix-tokens 400 --own-tokens 5 --generated-tokens 2 --no-warm-up",
            {"num_complete": 3, "num_cached_tokens": 2 * 400},
            [],
        ),
        (
            # After each answer but its last token, which has no KV yet: 16 of 17 and 33 of 34 slots, in whole blocks.
            "--workload chats --requests 2 --turns 3 --own-tokens 12 --generated-tokens 5",
            {"num_complete": 6, "num_prompt_tokens": 2 * (12 + 29 + 46), "num_cached_tokens": 2 * (16 + 32)},
            ["1", "2", "3"],
        ),
    ],
    ids=["unshared requests find nothing", "a document is read once", "turns of chats find what was before"],
)
async def test_a_workload_hits_what_it_shares(
    command: Command, arguments: str, expected: dict[str, int], turns: list[str]
) -> None:
    cases = await command.measured(ROOMY, *arguments.split())
    (run,) = cases["cold"]["runs"]
    assert run["num_planned"] == expected["num_complete"]
    assert expected.items() <= run.items()
    assert list(cases["cold"]["time_to_first_token_by_turn"]) == turns


async def test_mixed_lengths_tell_their_waste(command: Command) -> None:
    """It is looked at the blocks four times a second; each answer takes longer than that."""
    cases = await command.measured(
        SLOW, "--workload", "mixed", "--requests", "8", "--users", "4", "--prefix-tokens", "16", "--own-tokens",
        "60", "--generated-tokens", "60", "--seed", "7", "--no-warm-up",
    )  # fmt: skip
    (run,) = cases["cold"]["runs"]
    assert run["num_complete"] == 8
    waste = cases["cold"]["waste"]
    assert waste["num_samples"] >= 1
    # At most the rest of one block of each sequence is without a token, and every sequence here holds several.
    assert 0 <= waste["waste"] <= waste["waste_max"] < 0.25
    assert waste["reserve"] >= 0


async def test_the_tables_say_what_was_done(command: Command) -> None:
    status, out, err = await command.run(
        "--model", ROOMY, "--requests", "2", "--users", "1", "--prefix-tokens", "8", "--generated-tokens", "3"
    )
    assert status == 0
    for wanted in ("time to first token", "inter-token latency", "generated tokens/s", "2 of 2 complete", "hit rate"):
        assert wanted in out
    assert "shared: 2 requests of 8 shared + 32 own + 3 generated tokens; 1 user, closed loop" in err


async def test_a_workload_that_no_worker_has_room_for_is_one_line(command: Command) -> None:
    """By the pools of the workers, which are smaller than what the model allows."""
    status, out, err = await command.run("--model", ROOMY, "--prefix-tokens", "65536")
    assert (status, out) == (1, "")
    assert "the longest conversation has 65600 tokens with its answers, its workers take 4097" in err.splitlines()[-1]


async def test_a_worker_that_dies_midway_leaves_an_error_and_partial_figures(
    command: Command, cluster: Cluster
) -> None:
    """The last on that worker. An engine that falls silent: tests/load/test_bench_load.py."""
    before = (await cluster.worker(SLOW)).totals.num_prompt_tokens
    process = await command.start(
        "--json", "--model", SLOW, "--workload", "unshared", "--requests", "4000", "--users", "4", "--own-tokens", "20",
        "--generated-tokens", "20", "--no-warm-up",
    )  # fmt: skip

    async def has_served() -> bool:
        return (await cluster.worker(SLOW)).totals.num_prompt_tokens - before > 400

    await eventually(has_served, "twenty requests begin")
    cluster.kill(SLOW)
    out, err = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 1
    found = json.loads(out)
    (run,) = found["cases"]["cold"]["runs"]
    assert 10 <= run["num_complete"] < run["num_planned"] == 4000
    assert run["num_generated_tokens"] == 20 * run["num_complete"]
    assert found["cases"]["cold"]["end_to_end"]["count"] == run["num_complete"]
    last = err.decode().splitlines()[-1]
    assert last.startswith("kvpool: ")
    assert re.search("no worker took the request|no live worker", last), last
    assert "the run was ended there" in last
    assert found["error"] in last


async def test_ctrl_c_tells_what_was_complete(command: Command) -> None:
    process = await command.start(
        "--json", "--model", ROOMY, "--workload", "unshared", "--requests", "4", "--own-tokens",
        "8", "--generated-tokens", "4", "--repetitions", "1000",
    )  # fmt: skip
    assert process.stderr is not None
    while not (await process.stderr.readline()).startswith(b"repetition 3 "):
        pass
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 130
    assert "interrupted" in err.decode()
    assert 2 <= len(json.loads(out)["cases"]["cold"]["runs"]) < 1000

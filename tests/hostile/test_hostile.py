"""`make prove KIND=hostile` in small, without its times; and that its judges can find something."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from tests import http2
from tests.hostile.arena import VICTIM, Arena
from tests.hostile.attack import Attack
from tests.hostile.campaign import WORKER_SETTINGS, Settings, allow_files, attacks, wait
from tests.hostile.judge import Judge, Part
from tests.hostile.malformed import CASES
from tests.hostile.messages import MessageMaker
from tests.hostile.over_http import CASES as CASES_OF_HTTP
from tests.hostile.services import MANAGER_RPCS, WORKER_RPCS

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE = 60.0
"""Seconds for whatever must be as before; on a machine that is busy with other things too."""
SMALL = Settings(
    num_messages=200,
    num_malformed=4 * len(CASES),
    num_idle=40,
    num_reset_connections=4,
    num_resets_each=100,
    num_slow_readers=4,
    num_malformed_http=2 * len(CASES_OF_HTTP),
    num_idle_http=40,
    num_viewers=12,
    reader_seconds=90.0,
    lease_seconds=2.0,
)
TURN_SECONDS = 1.0
PAUSE_SECONDS = 0.1
"""Of the good client: its times are not judged here, so it need not keep a core busy."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Judge]:
    """A cluster and a good client for all tests here; what an attack breaks is replaced for the next."""
    allow_files()
    folder = tmp_path_factory.mktemp("hostile")
    arena = Arena(
        folder,
        lease_seconds=SMALL.lease_seconds,
        worker_settings=WORKER_SETTINGS,
        pause_seconds=PAUSE_SECONDS,
        turn_seconds=TURN_SECONDS,
    )
    async with Judge(arena, limit_seconds=None) as started:
        yield started


IN_SMALL = (
    "mutated messages",
    "malformed connections",
    "idle connections",
    "rapid reset",
    "slow readers",
    "HTTP: malformed requests",
    "HTTP: idle connections",
    "HTTP: viewers that stop",
    "path not UTF-8, manager",
    "path not UTF-8, worker",
    "messages to the manager",
    "messages to a worker",
    "epoch 2^23-1",
    "2^24 blocks",
    "reserve wish of 2^24",
    "reports without end",
    "a worker that hears nothing",
    "64 streams of Watch, 64 connections",
    "HTTP: trailers without end",
    "HTTP: pipelined requests without end",
)
"""Those that nothing else in `make test` does, and one of each other kind. The others are done to a gateway, a manager or a worker
alone, in tests/gateway, tests/cache_service/edge and tests/worker_service/test_worker_attacks.py, or to a command, in
tests/cli/test_cli_hostile_names.py."""
BY_NAME = {attack.name: attack for attack in attacks(SMALL, seed=1)}


@pytest.mark.parametrize("name", IN_SMALL)
async def test_no_attack_breaks_the_cluster(judge: Judge, name: str) -> None:
    """No process ends, the cluster is as before, `check` is clean, and the good client loses no answer and gets none wrong."""
    part = await judge.part(BY_NAME[name], PATIENCE)
    assert part.problems == [], part.said


# -- the judges


async def test_a_process_that_ends_is_found_and_replaced(judge: Judge) -> None:
    """Last of those that need the cluster, but not the end of it."""
    judge.arena.cluster.kill(VICTIM)
    nothing = Attack("nothing", partial(wait, seconds=0.0))
    part = await judge.part(nothing, PATIENCE)
    assert any(f"{VICTIM} has ended" in problem for problem in part.problems), part
    assert (await judge.part(nothing, PATIENCE)).problems == []


async def test_a_wrong_answer_is_found(judge: Judge) -> None:
    """The right answers say another token: the good client complains."""
    arena = judge.arena
    questions = arena.questions
    arena.questions = [type(one)(one.prompt, (*one.tokens[:-1], one.tokens[-1] ^ 1)) for one in questions]
    async with arena.good_client() as wrong:
        assert await wrong.answers(2, PATIENCE)
    arena.questions = questions
    asked = [call for call in wrong.calls if call.kind == "generate"]
    assert asked
    assert all(call.problem is not None and "answered" in call.problem for call in asked)


async def test_every_rpc_gets_every_kind_of_message_and_the_seed_decides_which() -> None:
    """Of each RPC some messages parse and others do not, unless it has no string that could be wrong."""
    for rpc in (*MANAGER_RPCS, *WORKER_RPCS):
        first, second = (MessageMaker(random.Random(7), {}) for _ in range(2))
        payloads = [first.payload(rpc.request) for _ in range(60)]
        assert payloads == [second.payload(rpc.request) for _ in range(60)], rpc
        assert len(set(payloads)) > 10, rpc
    names = {rpc.name for rpc in (*MANAGER_RPCS, *WORKER_RPCS)}
    assert {"Register", "Append", "KeepAlive", "Generate", "ServerReflectionInfo", "Watch"} <= names


async def test_a_part_knows_its_quantiles() -> None:
    part = Part("x", "", 1.0, [float(number) for number in range(1, 102)])
    assert (part.quantile(0.5), part.quantile(0.99), part.quantile(1.0)) == (51.0, 100.0, 101.0)
    assert Part("x", "", 1.0, [2.0]).quantile(0.99) == 2.0


async def test_the_headers_written_by_hand_are_those_that_a_server_reads(judge: Judge) -> None:
    """A call in order, made of the same bytes as the malformed ones, is answered."""
    async with await http2.Connection.connect(judge.arena.cluster.address()) as connection:
        await connection.start()
        await connection.send(http2.call(b"/kvpool.v1.CacheService/Describe", b""))
        kinds = []
        while (frame := await connection.read_frame()) is not None:
            kinds += [http2.Kind(frame.kind)] if frame.stream == 1 else []
            if frame.stream == 1 and frame.flags & http2.Flag.END_STREAM:
                break
    assert kinds == [http2.Kind.HEADERS, http2.Kind.DATA, http2.Kind.HEADERS]

"""Services that die, freeze and come back: nothing hangs, nothing stays held, and a new request is served within 5 s.

What a worker tells its streams then is looked at here, so they do not go on elsewhere; test_streams_go_on.py is about that.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import grpc
import pytest
import pytest_asyncio

from kvpool.client import Client, GenerateStream, Unavailable
from kvpool.v1 import worker_pb2
from kvpool.worker_service import incarnation
from tests.client.clients import begun
from tests.cluster.cluster import MANAGER, START_SECONDS, Cluster, TwoWorkers
from tests.cluster.truth import NUM_TOP, Truth, truths_of
from tests.until import eventually, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

LEASE_SECONDS = 1.0
SERVED_WITHIN_SECONDS = 20.0
"""Counted from the restarted process listening."""
ENDLESS_TOKENS = 30_000
STEP_SECONDS = 0.05


class Subject(TwoWorkers):
    """A cluster of the workers a and b, and what they must answer."""

    truths: list[Truth]

    async def is_served(self, client: Client) -> str:
        """A new request is answered, and with the truth; returns by whom."""
        truth = self.truths[2]
        completion = await client.generate(truth.prompt, max_tokens=len(truth.tokens), logprobs=NUM_TOP).collect()
        truth.check(completion)
        return completion.worker_id

    async def is_served_by(self, name: str) -> None:
        """This very worker answers a new request with the truth."""
        truth = self.truths[1]
        request = worker_pb2.GenerateRequest(sequence_id=str(uuid4()), attempt=1)
        request.token_ids.ids.extend(truth.prompt)
        request.stop.max_tokens = len(truth.tokens)
        answer = [token async for message in self.worker_stub(name).Generate(request) for token in message.token_ids]
        assert answer == truth.tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    async with Subject(tmp_path_factory.mktemp("failures"), lease_seconds=LEASE_SECONDS) as cluster:
        cluster.truths = truths_of(cluster.model)
        await cluster.start_both(num_blocks=65_537, grace_seconds=0.5, step_seconds=STEP_SECONDS)
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: Subject) -> AsyncIterator[Subject]:
    """Both workers live, before every test and behind it; all blocks have come back and every law holds."""
    async with shared.lent():
        yield shared


async def start_streams(client: Client, num_streams: int, num_tokens: int = ENDLESS_TOKENS) -> list[GenerateStream]:
    """Streams over unrelated prompts, each after its first token; by default they run for long."""
    streams = [client.generate([200 + index, *range(10)], max_tokens=num_tokens) for index in range(num_streams)]
    return [await begun(stream) for stream in streams]


@asynccontextmanager
async def load_on(cluster: Cluster, name: str, *, only: bool = False) -> AsyncIterator[list[GenerateStream]]:
    """Six streams that stay with their workers; yields those of the worker `name`. `only`: the others are ended first."""
    async with cluster.client(continuation=False) as client:
        streams = await start_streams(client, 6)
        own = [stream for stream in streams if await runs_on(cluster, stream, name)]
        assert own
        for stream in streams:
            if only and stream not in own:
                await stream.aclose()
        yield own
        for stream in streams:
            await stream.aclose()


async def ends_of(streams: list[GenerateStream]) -> list[object]:
    """What comes of the streams, which must end soon: errors, or completions."""
    async with asyncio.timeout(20.0):
        return await asyncio.gather(*(stream.collect() for stream in streams), return_exceptions=True)


async def test_a_manager_killed_under_load_comes_back_and_serves(cluster: Subject) -> None:
    before = (await cluster.worker("a")).session
    async with cluster.client(continuation=False) as client:
        streams = await start_streams(client, 6)
        cluster.kill(MANAGER)
        # Decoding lives on the reserve for a while.
        for stream in streams:
            assert (await anext(stream)).token_ids
        await cluster.start_manager()
        listening = time.monotonic()
        await cluster.is_served(client)
        assert time.monotonic() - listening < SERVED_WITHIN_SECONDS
        async with cluster.client() as newcomer:
            await cluster.is_served(newcomer)
        await until_known(cluster, streams)
        assert (await cluster.worker("a")).session >> 40 == (before >> 40) + 1
        for stream in streams:
            await stream.aclose()


async def test_requests_that_wait_while_the_manager_is_away_are_answered_by_the_next_one(cluster: Subject) -> None:
    async with cluster.client() as client:
        await cluster.is_served(client)
        cluster.kill(MANAGER)
        waiting = [asyncio.create_task(cluster.is_served(client)) for _ in range(4)]
        await asyncio.sleep(0.3)
        await cluster.start_manager()
        async with asyncio.timeout(SERVED_WITHIN_SECONDS):
            assert {await task for task in waiting} <= {"a", "b"}


async def test_a_manager_that_is_told_to_stop_exits_in_peace(cluster: Subject) -> None:
    async with cluster.client(continuation=False) as client:
        streams = await start_streams(client, 2)
        cluster.processes[MANAGER].send(signal.SIGTERM)
        assert await cluster.processes[MANAGER].ended() == 0
        await cluster.start_manager()
        await until_known(cluster, streams)
        for stream in streams:
            await stream.aclose()


async def test_a_worker_killed_under_load_is_passed_over_and_returns_under_its_name(cluster: Subject) -> None:
    """It has free blocks, and fences its last life although the wall clock was an hour ahead when that began."""
    async with cluster.client() as client, cluster.client() as newcomer:
        victim = await cluster.is_served(client)
        other = {"a": "b", "b": "a"}[victim]
        before = await cluster.worker(victim)
        async with load_on(cluster, victim) as streams:
            cluster.kill(victim)
            for error in await ends_of(streams):
                assert isinstance(error, Unavailable)
        assert await cluster.is_served(client) == other
        assert await cluster.is_served(newcomer) == other
    found = incarnation._read(cluster.state_dir(victim))
    assert found is not None
    assert found[0] == before.incarnation
    ahead = time.time_ns() + 3600 * 10**9
    (cluster.state_dir(victim) / "incarnation").write_bytes(incarnation._encode(ahead, found[1]))
    cluster.start_worker(victim)
    listening = await cluster.until_serving(victim, or_not=True)
    await cluster.until_registered(victim)
    after = await cluster.worker(victim)
    await cluster.is_served_by(victim)
    assert time.monotonic() - listening < SERVED_WITHIN_SECONDS
    assert after.session > before.session
    assert after.incarnation == ahead + 1
    assert after.counts[0].free == after.counts[0].capacity


async def until_known(cluster: Cluster, streams: list[GenerateStream]) -> None:
    """Until the manager of now knows of every stream's sequence that it holds blocks, and each has delivered more."""
    await cluster.until_registered("a", "b")
    for stream in streams:

        async def is_known(stream: GenerateStream = stream) -> bool:
            return await runs_on(cluster, stream, "a") or await runs_on(cluster, stream, "b")

        await eventually(is_known, "the manager knows the stream", 20.0)
        assert (await anext(stream)).token_ids


async def runs_on(cluster: Cluster, stream: GenerateStream, name: str) -> bool:
    """Whether the worker's blocks name the stream's sequence."""
    worker = await cluster.worker(name)
    return any(key.sequence_id == stream.sequence_id for block in worker.blocks for key in block.owners)


async def test_a_frozen_worker_is_fenced_after_its_lease_and_comes_back(cluster: Subject) -> None:
    async with cluster.client(continuation=False, liveness_interval=0.5) as client:
        frozen = await cluster.is_served(client)
        other = {"a": "b", "b": "a"}[frozen]
        async with load_on(cluster, frozen) as streams:
            before = await cluster.worker(frozen)
            cluster.suspend(frozen)
            # Not fenced yet, so still ranked first: this client waits for it, finds its lease ended, and goes on.
            # Every hiccup of the manager lengthens the lease, so on a busy machine this may take a while.
            async with asyncio.timeout(LEASE_SECONDS + 20.0):
                assert await cluster.is_served(client) == other

            async def is_fenced() -> bool:
                return [worker.worker_id for worker in await cluster.describe()] == [other]

            await eventually(is_fenced, "the frozen worker is fenced", 20.0)
            assert await cluster.is_served(client) == other
            cluster.resume(frozen)
            await until_known(cluster, streams)
            after = await cluster.worker(frozen)
            assert (after.incarnation, after.session > before.session) == (before.incarnation, True)
        await cluster.both_live()
        await cluster.is_served_by(frozen)


async def test_of_two_workers_with_one_name_the_first_stays(cluster: Subject) -> None:
    """The second one exits with status 1 and says why, on this machine before it has loaded its model, on another one when the
    manager has refused it for some leases. The streams of the first one go on."""
    before = await cluster.worker("a")
    async with load_on(cluster, "a", only=True) as streams:
        here, elsewhere = cluster.start_rival("a"), cluster.start_rival("a", state_dir=cluster.state_dir("elsewhere"))
        try:
            assert await here.ended(START_SECONDS) == 1
            assert f"process {cluster.processes['a'].pid} runs this worker already" in here.log
            assert "listening" not in here.log
            assert await elsewhere.ended(START_SECONDS) == 1
            assert "refused this worker" in elsewhere.log
            assert "another --worker-id" in elsewhere.log
        finally:
            here.kill()
            elsewhere.kill()
        for stream in streams:
            assert (await anext(stream)).token_ids
        after = await cluster.worker("a")
        assert (after.incarnation, after.address) == (before.incarnation, before.address)


async def test_a_drained_worker_ends_what_runs_takes_nothing_new_and_leaves(cluster: Subject) -> None:
    """Within the grace that the order gives, not its own half second."""
    num_tokens = 30
    while not await drained_with_streams(cluster, num_tokens):
        # The streams had ended before the worker heard of the order: this machine is slow to look.
        num_tokens *= 4
        assert num_tokens <= ENDLESS_TOKENS
        cluster.start_worker("a")
        await cluster.both_live()
    cluster.start_worker("a")


async def drained_with_streams(cluster: Subject, num_tokens: int) -> bool:
    """Drain the worker a, which then has left; False if no stream of so many tokens still ran on it when it heard of the order."""
    async with cluster.client() as client:
        streams = await start_streams(client, 6, num_tokens=num_tokens)
        worker = cluster.processes["a"]
        told = len(worker.log)
        await client.drain("a", grace=60.0)
        # The manager hands the order on with its next answer.
        await until(lambda: "draining" in worker.log[told:], pause=0.02)
        assert await cluster.is_served(client) == "b"
        if has_streams := "num_running=0" not in worker.log[told:]:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cluster.is_served_by("a")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        completions = [await stream.collect() for stream in streams]
        assert {(completion.finish_reason, completion.num_attempts) for completion in completions} == {("length", 1)}
        if has_streams:
            assert "a" in {completion.worker_id for completion in completions}
        assert await worker.ended() == 0
        assert "num_requests" not in worker.log.rpartition("draining")[2]
        assert [description.worker_id for description in await cluster.describe()] == ["b"]
    return has_streams


async def test_a_signal_cuts_the_grace_short(cluster: Subject) -> None:
    """Ctrl-C while it drains: the manager forgets the worker before its lease would end."""
    async with cluster.client() as client, load_on(cluster, "a") as streams:
        worker = cluster.processes["a"]
        told = len(worker.log)
        await client.drain("a", grace=3600.0)
        await until(lambda: "draining" in worker.log[told:], pause=0.02)
        assert worker.status is None
        worker.send(signal.SIGINT)
        for error in await ends_of(streams):
            assert isinstance(error, Unavailable)
            assert error.reason == "DRAINING"
        assert await worker.ended() == 130
        assert [description.worker_id for description in await cluster.describe()] == ["b"]
        assert await cluster.is_served(client) == "b"
    assert "lease expired" not in cluster.processes[MANAGER].log.rpartition("deregistered")[2]
    cluster.start_worker("a")

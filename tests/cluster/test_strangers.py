"""A peer that reaches the manager's port and knows what Describe shows, next to a worker at work: no text, and no session, notices.

Each call alone: tests/cache_service/edge/test_edge_strangers.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.peer import reason_in
from tests.cache_service.edge.test_edge_strangers import CALLS, Stranger, seen
from tests.cluster.in_process import WORKER, InProcessCluster, in_process_cluster
from tests.cluster.polling import eventually
from tests.cluster.truth import NUM_TOP, check_all, truths_of
from tests.tiny_models import make_tiny_model

_WITHOUT_BLOCKS = {"Free with the reserve"}
"""Needs a reserve, which is empty now and then."""


async def is_serving(cluster: InProcessCluster) -> bool:
    """What the worker's health says."""
    async with grpc.aio.insecure_channel(cluster.worker.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_stranger_in_the_session_changes_no_text(tmp_path: Path) -> None:
    """It states invented tokens for whatever sequence it sees, uses up call numbers, says good-bye: for as long as requests run."""
    tiny = make_tiny_model("llama", tmp_path / "llama")
    truths = truths_of(tiny)
    async with in_process_cluster(tiny.path, tmp_path) as cluster:
        session = cluster.manager.manager.worker(WORKER)
        refusals: Counter[str] = Counter()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.manager.port}") as channel:
            stub = cache_pb2_grpc.CacheServiceStub(channel)

            async def disturb() -> None:
                while True:
                    victim = await seen(stub, WORKER)
                    if not victim.sequences:
                        await asyncio.sleep(0)
                        continue
                    for name in CALLS.keys() - _WITHOUT_BLOCKS:
                        try:
                            await CALLS[name](Stranger(stub, victim, b""))
                            refusals[f"{name} was done"] += 1
                        except grpc.aio.AioRpcError as error:
                            refusals[reason_in(error)] += 1

            disturbing = asyncio.create_task(disturb())
            for turn in itertools.count():
                answers = await cluster.all_at_once(
                    tiny.prompts, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP, tenant_salt=f"{turn % 3}"
                )
                check_all(truths, answers)
                if turn >= 3 and refusals.total() >= 10 * len(CALLS):
                    break
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
        assert refusals.keys() == {"WRONG_KEY"}
        assert cluster.manager.manager.worker(WORKER) is session
        assert not session.draining
        assert cluster.worker._link.num_sessions == 1
        assert await is_serving(cluster)
        # What is in the cache now is what was computed.
        check_all(truths, await cluster.all_at_once(tiny.prompts, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP))


async def test_used_up_call_numbers_cost_one_registration(tmp_path: Path) -> None:
    """The second line, should a key get out: the numbers have a bound, and a worker that is answered STALE_CALL three times
    registers again and goes on."""
    tiny = make_tiny_model("llama", tmp_path / "llama")
    truths = truths_of(tiny)
    async with in_process_cluster(tiny.path, tmp_path) as cluster:
        session = cluster.manager.manager.worker(WORKER)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.manager.port}") as channel:
            stub = cache_pb2_grpc.CacheServiceStub(channel)

            async def use_up(call_no: int) -> str:
                head: dict[str, Any] = {"session": session.number, "session_key": session.key, "call_no": call_no}
                try:
                    await stub.Free(pb.FreeRequest(uplink=pb.Uplink(**head)))
                except grpc.aio.AioRpcError as error:
                    return reason_in(error)
                return ""

            assert await use_up(2**64 - 1) == "BAD_FIELD"
            answers = asyncio.gather(
                cluster.all_at_once(tiny.prompts, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP)
            )
            assert await use_up(session.last_call_no + (1 << 20)) == ""
            ((*completions,),) = await answers
            check_all(truths, completions)

        async def serves_in_a_new_session() -> bool:
            is_new = cluster.manager.manager.worker(WORKER) is not session
            return is_new and await cluster.is_registered() and await is_serving(cluster)

        await eventually(serves_in_a_new_session, "the worker registers again")
        assert cluster.worker._link.num_failed_calls >= 3
        assert cluster.worker._link.num_sessions == 2
        check_all(truths, await cluster.all_at_once(tiny.prompts, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP))

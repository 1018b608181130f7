"""Scheduling never changes a text: policies, chunks, budgets, tenants, priorities, pools that are too small."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvpool.worker_service.engine.policy import SchedulingPolicy
from tests.lockstep import in_lockstep
from tests.tracer import expected_text
from tests.until import until
from tests.worker_service.test_engine_over_core import prompts_with_shared_beginnings
from tests.worker_service.world import World, read, read_right


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("budget", [6, 256])
@pytest.mark.parametrize("num_blocks", [15, 400])
async def test_every_text_is_right(policy: SchedulingPolicy, chunk: int, budget: int, num_blocks: int) -> None:
    """Requests of several tenants and priorities, prefilled beside decodes in chunks of at most `chunk` tokens."""
    rng = random.Random(chunk * 1000 + budget)
    world = World(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        max_mixed_prefill_tokens=chunk,
        scheduling_policy=policy,
    )
    async with world.running():
        prompts = prompts_with_shared_beginnings(rng, 12, 30)
        requests = [
            world.submit(prompt, 10, tenant=rng.choice(["", "a", "b"]), priority=rng.choice([-1, 0, 1]))
            for prompt in prompts
        ]
        async with in_lockstep(world.engine, len(requests)):
            await read_right(*requests)
        assert (world.engine.scheduler.num_preemptions > 0) == (num_blocks == 15)


async def test_a_better_priority_overtakes_those_that_wait_and_not_those_that_run() -> None:
    """One place in the batch: who has it keeps it, then the better level comes first."""
    world = World(num_blocks=100, block_size=4, max_num_seqs=1, scheduling_policy=SchedulingPolicy.priority)
    async with world.running():
        ended: list[str] = []

        async def ask(name: str, priority: int) -> None:
            assert await world.generate([1, 2, 3], 8, sequence_id=name, priority=priority) == expected_text(
                [1, 2, 3], 8
            )
            ended.append(name)

        tasks = [asyncio.create_task(ask("running", 5))]
        await until(lambda: world.engine.scheduler.num_running, pause=0)
        tasks += [
            asyncio.create_task(ask(name, priority)) for name, priority in [("worse", 1), ("usual", 0), ("best", -1)]
        ]
        await asyncio.gather(*tasks)
        assert ended == ["running", "best", "usual", "worse"]


async def test_what_a_preempted_request_held_is_evicted_from_its_end() -> None:
    """Its blocks come back last block first, so the head of its prefix is what outlives, and what the next round is served."""
    world = World(num_blocks=40, block_size=4)
    async with world.running():
        manager, pool = world.manager, world.manager.worker("w0").pools[0]
        orders: list[list[int]] = []
        free = manager.free

        def watched(*args: object) -> object:
            reply = free(*args)  # type: ignore[arg-type]
            orders.append(list(pool.free_list()))
            return reply

        manager.free = watched  # type: ignore[method-assign, assignment]
        scheduler = world.engine.scheduler
        schedule = scheduler.schedule
        held: list[int] = []

        def preempting(now: float) -> object:
            if request.num_generated == 4 and not held:
                held.extend(request.sequence.tables[0])
                scheduler._preempt(request, now)
            return schedule(now)

        scheduler.schedule = preempting  # type: ignore[method-assign, assignment]
        request = world.submit(list(range(22)), 30)
        assert await read(request) == expected_text(list(range(22)), 30)
        order = [block for block in orders[0] if block in held]
        assert order == held[::-1], "the end of the sequence is evicted before its beginning"
        assert request.num_preemptions == 1
        num_again = world.engine.stats.num_forwarded_tokens - (22 + 29)
        assert 1 <= num_again <= 4, "only what was in the last block is computed again"

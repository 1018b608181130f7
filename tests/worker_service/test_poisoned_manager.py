"""A manager that was made to believe something wrong of a block: the worker notices, and its text is right."""

from __future__ import annotations

import asyncio
import threading

from kvpool.cache_service.core.messages import AppendItem, SequenceUpdate, Uplink
from tests.tracer import expected_text
from tests.until import until
from tests.worker_service.world import World, read

PROMPT = [1, 2, 3, 4, 5, 6]
INVENTED = [900, 901]


def seal_under_invented_tokens(world: World) -> None:
    """What a peer can do that knows the key of the session: Append in it, before the worker does."""
    (session,) = world.manager.sessions
    (sequence,) = session.sequences.values()
    tokens = b"".join(token.to_bytes(4, "little") for token in INVENTED)
    update = SequenceUpdate(sequence.key, len(PROMPT), tokens, len(PROMPT) + len(INVENTED))
    (appended,), _ = world.manager.append(
        Uplink(session.number, session.last_call_no + 1, key=session.key), [AppendItem(update)]
    )
    assert getattr(appended, "num_sealed_tokens", 0) == 8, appended


async def test_a_block_sealed_under_invented_tokens_is_never_served() -> None:
    """The victim's Free seals nothing, for its tokens differ, and its block stays a hit for the invented prompt. The worker knows
    what the block holds: it gives the session up, reports, and computes."""
    world = World(num_blocks=64, block_size=4, report_seconds=60.0)
    step = world.model.gate = threading.Event()  # the first step waits: without it the victim may end before it is seen
    async with world.running():
        victim = world.submit(PROMPT, 3)
        await until(lambda: world.manager.sessions[0].sequences)
        world.wire.gate = asyncio.Event()  # the next call of the worker is its Free
        step.set()
        assert await read(victim) == expected_text(PROMPT, 3)
        seal_under_invented_tokens(world)
        world.wire.gate.set()
        world.wire.gate = None
        await world.until_idle()

        prompt = [*PROMPT, *INVENTED, 7]
        assert await world.generate(prompt, 5) == expected_text(prompt, 5)
        assert world.link.num_sessions == 2, "the worker has noticed, and has registered again"
        # The report has put it right: what the block really holds is a hit for the prompt that it was computed for.
        text = expected_text(PROMPT, 3)
        going_on = world.submit([*PROMPT, *text[:2], 7], 4)
        assert await read(going_on) == expected_text([*PROMPT, *text[:2], 7], 4)
        assert going_on.num_cached_tokens == 8
        assert world.link.num_sessions == 2

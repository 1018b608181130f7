"""Mutated messages over every RPC of every service. A session of the attacker's own lets some of them get further."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import grpc

from tests.cluster.cluster import MANAGER
from tests.hostile.arena import VICTIM, Arena
from tests.hostile.attack import OnDone, Outcome
from tests.hostile.messages import Known, MessageMaker
from tests.hostile.services import MANAGER_RPCS, WORKER_RPCS, Rpc
from tests.hostile.stranger import FINGERPRINT, Stranger

AT_ONCE: Final = 16
NUM_CHANNELS: Final = 4
CALL_SECONDS: Final = 2.0
MAX_ANSWERS: Final = 3
"""Read of a stream before it is cancelled."""
RENEW_AFTER: Final = 20
"""Calls in the attacker's session that were refused in a row: it registers again."""
DEFECTS: Final = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""No message may be answered with these: the service did not know what to say."""
_STRANGERS: Final = tuple(f"fuzz-worker-{number}" for number in range(9))


async def fuzz(arena: Arena, outcome: Outcome, seed: int, count: int, on_done: OnDone) -> None:
    """Send `count` mutated messages; a status that is none of the table's is a problem."""
    fuzzer = _Fuzzer(arena, seed, count, on_done)
    await fuzzer.run()
    outcome.count(fuzzer.outcomes)
    if fuzzer.defects:
        worst = "; ".join(f"{what} ({times} times)" for what, times in fuzzer.defects.most_common(2))
        outcome.problems.append(f"{fuzzer.defects.total()} messages were answered no status of the table, e.g. {worst}")


class _Fuzzer:
    """`outcomes` counts the statuses, `defects` names those that are none of the table."""

    def __init__(self, arena: Arena, seed: int, count: int, on_sent: OnDone) -> None:
        self._arena = arena
        self._draw = random.Random(seed)
        self._count = count
        self._on_sent = on_sent
        self._refused_in_a_row = 0
        self.outcomes: Counter[str] = Counter()
        self.defects: Counter[str] = Counter()

    async def run(self) -> None:
        """Until all are answered. A server that has gone does not end it."""
        arena = self._arena
        rpcs = [(MANAGER, rpc) for rpc in MANAGER_RPCS] + [(VICTIM, rpc) for rpc in WORKER_RPCS]
        channels = {name: [arena.channel(name) for _ in range(NUM_CHANNELS)] for name in (MANAGER, VICTIM)}
        self._stranger = Stranger(channels[MANAGER][0], _STRANGERS[0])
        await self._renew()
        makers = {rpc.path: MessageMaker(self._draw, self._known(rpc)) for _, rpc in rpcs}
        places = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as sending:
            for number in range(self._count):
                # Each RPC as often as any other, in an order that is the seed's.
                name, rpc = rpcs[self._draw.randrange(len(rpcs))]
                await places.acquire()
                payload = makers[rpc.path].payload(rpc.request)
                one = sending.create_task(self._send(channels[name][number % NUM_CHANNELS], rpc, payload))
                one.add_done_callback(lambda _: places.release())
                if number % 100 == 0:
                    self._on_sent(number)
                if self._refused_in_a_row >= RENEW_AFTER:
                    await self._renew()
        self._on_sent(self._count)
        for channel in (channel for group in channels.values() for channel in group):
            await channel.close()

    async def _renew(self) -> None:
        self._refused_in_a_row = 0
        try:
            await self._stranger.register()
        except grpc.aio.AioRpcError as error:
            self.outcomes[f"stranger's Register {error.code().name}"] += 1

    def _known(self, rpc: Rpc) -> Known:
        """Values that get further than invented ones. Of those that work here only what changes nothing for others:
        Register and Drain name strangers only."""
        arena, stranger = self._arena, self._stranger
        names = _STRANGERS if rpc.name in ("Register", "Drain") else (*_STRANGERS, VICTIM)
        known: dict[str, Callable[[random.Random], Any]] = {
            "worker_id": lambda draw: draw.choice(names),
            "sequence_id": lambda draw: f"fuzz-{draw.randrange(40)}",
            "attempt": lambda draw: draw.choice((1, 1, 2)),
            "round": lambda draw: draw.choice((0, 0, 1)),
            "block_size": lambda draw: draw.choice((1, 16, 65_536)),
            "tier": lambda draw: 1,
            "group": lambda draw: 0,
            "part": lambda draw: draw.choice((0, 1)) if rpc.name == "Report" else None,
            "max_tokens": lambda draw: draw.choice((1, 2, 40)),
            "downlink_ack": lambda draw: draw.choice((0, 1, 2)),
        }
        if rpc.name in ("Route", "Generate"):
            known["model_fingerprint"] = lambda draw: draw.choice(("", arena.model_fingerprint))
        elif rpc.name != "Register":
            known["model_fingerprint"] = lambda draw: FINGERPRINT
        if rpc.name != "Register":
            known["call_no"] = lambda draw: stranger.uplink().call_no
            known["session"] = lambda draw: stranger.session
            known["session_key"] = lambda draw: stranger.session_key
        return known

    async def _send(self, channel: grpc.aio.Channel, rpc: Rpc, payload: bytes) -> None:
        code = grpc.StatusCode.OK
        try:
            max_answers = 1 if rpc.name == "Watch" else MAX_ANSWERS
            await rpc.call(channel, payload, CALL_SECONDS, max_answers)
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code in DEFECTS:
                self.defects[f"{rpc.path} answered {code.name}: {error.details()}"[:200]] += 1
        is_led = any(field.name in ("uplink", "session") for field in rpc.request.fields)
        if code is grpc.StatusCode.FAILED_PRECONDITION and is_led:
            self._refused_in_a_row += 1
        elif code is grpc.StatusCode.OK and is_led:
            self._refused_in_a_row = 0
        self.outcomes[code.name] += 1

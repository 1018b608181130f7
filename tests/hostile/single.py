"""Attacks of one message or a few, each by name: what was seen to stop, poison or wedge a cluster.

In sessions of its own the attacker has the key that Register has answered it, in those of others what Describe shows.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf import wrappers_pb2

from kvpool.cache_service.core.manager import REPORT_FIRST_SECONDS
from kvpool.cache_service.core.messages import Limits
from kvpool.cache_service.watching.places import TURN_SECONDS
from kvpool.v1 import cache_pb2, common_pb2, worker_pb2
from tests import http2
from tests.attacks import at_manager, at_worker
from tests.cluster.cluster import MANAGER
from tests.hostile.arena import CALL_SECONDS, NUM_TOKENS, VICTIM, WORKERS, Arena
from tests.hostile.attack import Attack, Outcome, bounded, status_of
from tests.hostile.fuzz import DEFECTS
from tests.hostile.services import MANAGER_RPCS, WORKER_RPCS
from tests.hostile.stranger import FINGERPRINT, Stranger, registration

SLACK_SECONDS: Final = 4.0
"""On a busy machine."""
NUM_WATCHERS: Final = 64
"""Places for streams of Watch, by default."""
LOOK_SECONDS: Final = 15.0
COMMAND_SECONDS: Final = 60.0


# -- requests that are none


async def path_not_utf8(arena: Arena, outcome: Outcome, name: str) -> None:
    async with await http2.Connection.connect(arena.cluster.address(name)) as connection:
        await connection.send(http2.PREFACE, http2.settings(), http2.call(b"/\xff", b""))
        closed = await connection.read_until_end(0.5)
    outcome.said.append(f"connection {'closed' if closed else 'left open'}")


async def oversize(arena: Arena, outcome: Outcome) -> None:
    """Messages over the transport's limit and at it, one that claims to be of 4 GiB, and one that is 48 MiB once unpacked."""
    for name, rpcs, method in ((MANAGER, MANAGER_RPCS, "Route"), (VICTIM, WORKER_RPCS, "Generate")):
        rpc = next(rpc for rpc in rpcs if rpc.name == method)
        path = rpc.path.encode()
        with bounded(arena, outcome, name):
            async with arena.channel(name) as channel:
                for size in ((16 << 20) + 1, 48 << 20, (16 << 20) - 64):
                    # Field 99 instead of 1: no message has it, and a parser would keep it.
                    payload = b"\x9a\x06" + wrappers_pb2.BytesValue(value=bytes(size)).SerializeToString()[1:]
                    code = await status_of(rpc.call(channel, payload, CALL_SECONDS))
                    outcome.said.append(f"{size >> 20} MiB to {name}: {code.name}")
                    if code is grpc.StatusCode.OK or code in DEFECTS:
                        outcome.problems.append(f"{size:,} bytes to {rpc.path} were answered {code.name}")
            async with await http2.Connection.connect(arena.cluster.address(name)) as connection:
                await connection.send(http2.PREFACE, http2.settings(), http2.headers(http2.request_headers(path)))
                await connection.send(http2.data(http2.message(b"", length=(1 << 32) - 1), flags=0))
                await connection.read_until_end(0.3)
            async with await http2.Connection.connect(arena.cluster.address(name)) as connection:
                head = http2.headers(http2.request_headers(path, further=[(b"grpc-encoding", b"gzip")]))
                # Under 64 KiB, so that it fits the window that a connection begins with.
                bomb = http2.message(gzip.compress(bytes(48 << 20)), compressed=1)
                await connection.send(http2.PREFACE, http2.settings(), head)
                for at in range(0, len(bomb), 1 << 14):
                    await connection.send(http2.data(bomb[at : at + (1 << 14)], flags=http2.Flag.NONE))
                await connection.read_until_end(0.3)


# -- messages of the table, while a stream runs

_LONG: Final = worker_pb2.StopConditions(max_tokens=300, ignore_eos=True)
"""Of a stream that Describe shows while it runs."""


async def _seen_running(arena: Arena, sequence_id: str) -> cache_pb2.WorkerDescription | None:
    """The victim, as soon as Describe shows that sequence there; that one alone, with its blocks."""
    deadline = time.monotonic() + LOOK_SECONDS
    request = cache_pb2.DescribeRequest(worker_id=VICTIM, max_sequences=50, include_blocks=True)
    async with arena.channel() as channel:
        while time.monotonic() < deadline:
            (worker,) = (await arena.stub(channel).Describe(request, timeout=CALL_SECONDS)).workers
            found = [sequence for sequence in worker.sequences if sequence.key.sequence_id == sequence_id]
            if found:
                del worker.sequences[:]
                worker.sequences.extend(found)
                return worker
    return None


async def _during_a_stream(
    arena: Arena, outcome: Outcome, attack: Callable[[cache_pb2.WorkerDescription], Awaitable[None]]
) -> None:
    """Attack while the victim generates; the stream must come to its end, and be right."""
    async with arena.channel(VICTIM) as channel:
        question = arena.questions[0]
        sequence_id = f"stream-{time.monotonic_ns()}"
        stream = arena.open_stream(channel, question.prompt, sequence_id=sequence_id, stop=_LONG)
        tokens: list[int] = []

        async def read() -> None:
            async for part in stream:
                tokens.extend(part.token_ids)

        reading = asyncio.create_task(read())
        worker = await _seen_running(arena, sequence_id)
        if worker is None:
            outcome.problems.append("the stream never showed in Describe")
        else:
            await attack(worker)
        try:
            await reading
        except grpc.aio.AioRpcError as error:
            outcome.problems.append(f"the stream that ran ended with {error.code().name} after {len(tokens)} tokens")
        else:
            if tuple(tokens[:NUM_TOKENS]) != question.tokens or len(tokens) != _LONG.max_tokens:
                outcome.problems.append(f"the stream that ran gave {len(tokens)} tokens, or wrong ones")


async def _judge_messages(
    arena: Arena, outcome: Outcome, name: str, calls: Sequence[tuple[Any, Callable[[], Awaitable[object]]]]
) -> None:
    """Each message is answered the status of the table, and costs its receiver a line of the log at most."""
    process = arena.cluster.processes[name]
    lines = process.log.count("\n")
    for message, call in calls:
        code = await status_of(call())
        if code is not message.code:
            outcome.problems.append(f"{message} was answered {code.name}, not {message.code.name}")
    added = process.log.count("\n") - lines
    outcome.said.append(f"{len(calls)} messages, {added} log lines")
    if added > len(calls):
        outcome.problems.append(f"{name} logged {added} lines")


async def messages_to_the_manager(arena: Arena, outcome: Outcome) -> None:
    """In the session of another, with impossible numbers, in another's name, and bytes."""

    async def attack(worker: cache_pb2.WorkerDescription) -> None:
        async with arena.channel() as channel:
            # A session of the attacker's own, whose key it tries on those of others.
            own = await Stranger.begin_on(channel)
            scene = at_manager.Scene(channel, worker, own.session, own.session_key, registration("one more"))
            # Those that could end the stream first, so that they come while it runs.
            calls = [(one, partial(one.send, scene)) for one in at_manager.ALL]
            await _judge_messages(arena, outcome, MANAGER, calls)
            await own.deregister()

    await _during_a_stream(arena, outcome, attack)


async def messages_to_a_worker(arena: Arena, outcome: Outcome) -> None:
    """Bytes, and a text that it refuses before it is tokenised: memory shows it, on a fast machine too."""
    with bounded(arena, outcome, VICTIM):
        async with arena.channel(VICTIM) as channel:

            def call(one: at_worker.Attack) -> Awaitable[object]:
                method: Any = channel.unary_unary(one.path)
                answer: Awaitable[object] = method(one.payload(), timeout=COMMAND_SECONDS)
                return answer

            await _judge_messages(arena, outcome, VICTIM, [(one, partial(call, one)) for one in at_worker.ALL])


# -- registrations


async def claim_epochs(arena: Arena, outcome: Outcome, claims: Sequence[int | None]) -> None:
    """Claim, again and again, to have seen epochs in another life; None: the manager's own. Others may lose their session at most
    once per lease, the bound of a manager that began without a state file."""
    began_at, before = time.monotonic(), (await arena.describe()).epoch
    sessions = {name: {(await arena.described(name)).session} for name in WORKERS}
    async with arena.channel() as channel:
        for claim in claims:
            epoch = (await arena.describe()).epoch if claim is None else claim
            request = registration(highest_epoch_seen=epoch)
            outcome.said.append((await status_of(arena.stub(channel).Register(request, timeout=CALL_SECONDS))).name)
            for problem in await arena.problems(LOOK_SECONDS):
                outcome.problems.append(problem)
                return
            for name in WORKERS:
                sessions[name].add((await arena.described(name)).session)
    after = (await arena.describe()).epoch
    outcome.said.append(f"epoch {before} → {after}")
    if after > before + (1 << 16) + 1:
        outcome.problems.append(f"the epoch went from {before} to {after}")
    most = 2 + int((time.monotonic() - began_at) / arena.lease_seconds)
    for name, seen in sessions.items():
        if len(seen) > most:
            outcome.problems.append(f"{name} was in {len(seen)} sessions in turn")


async def huge_pools(arena: Arena, outcome: Outcome) -> None:
    """Eight registrations of 2^24 blocks each."""
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(arena.channel())
        codes = []
        with bounded(arena, outcome, MANAGER):
            for number in range(8):
                stranger = Stranger(channel, f"huge-{number}", num_blocks=1 << 24)
                codes.append(await status_of(stranger.register()))
                if codes[-1] is grpc.StatusCode.OK:
                    stack.push_async_callback(status_of, stranger.deregister())
            outcome.said.append(", ".join(sorted({code.name for code in codes})))


_EXECUTED_OR_REFUSED: Final = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
}


async def huge_wish(arena: Arena, outcome: Outcome) -> None:
    """One call that wishes for a reserve of 2^24 blocks; its reply must come, and so must that to the next heartbeat."""
    async with arena.channel() as channel:
        stranger = Stranger(channel, num_blocks=1 << 24)
        with bounded(arena, outcome, MANAGER):
            stranger.seconds = COMMAND_SECONDS
            code = await status_of(stranger.register())
            outcome.said.append(f"Register: {code.name}")
            if code is not grpc.StatusCode.OK:
                return
            append = cache_pb2.AppendRequest(uplink=stranger.uplink(1 << 24))
            calls: dict[str, Awaitable[object]] = {
                "Append": stranger.stub.Append(append, timeout=COMMAND_SECONDS),
                "KeepAlive": stranger.keep_alive(),
            }
            for what, call in calls.items():
                code = await status_of(call)
                outcome.said.append(f"{what}: {code.name}")
                # A call that was executed and whose reply cannot be sent is the one thing that may not be.
                if code not in _EXECUTED_OR_REFUSED:
                    outcome.problems.append(f"{what} was answered {code.name}: its reply could not be sent")
        await status_of(stranger.deregister())


# -- the same for ever


async def _for_ever(step: Callable[[], Awaitable[object]], seconds: float) -> None:
    while True:
        await status_of(step())
        await asyncio.sleep(seconds)


async def _next_to(
    arena: Arena, outcome: Outcome, attackers: Sequence[Coroutine[Any, Any, None]], work: Awaitable[None]
) -> None:
    """Do the work of a good peer while attackers go on, with bounds on what all of it costs the manager."""
    with bounded(arena, outcome, MANAGER, most_cpu_seconds=1.0):
        tasks = [asyncio.create_task(attacker) for attacker in attackers]
        try:
            await work
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _report_for_ever(reporter: Stranger) -> None:
    """As far as the first content, and then nothing but heartbeats."""
    await status_of(reporter.register())
    while True:
        if reporter.part < 2:
            await status_of(reporter.report_next())
        await status_of(reporter.keep_alive())
        await asyncio.sleep(0.1)


async def _report(arena: Arena, outcome: Outcome, most_seconds: float) -> None:
    async with arena.channel() as channel:
        reporter = Stranger(channel, holds_state=True)
        await reporter.register()
        await reporter.report_next()
        began_at = time.monotonic()
        while await status_of(reporter.report_next(last=True)) is not grpc.StatusCode.OK:
            if time.monotonic() - began_at > most_seconds:
                outcome.problems.append(f"a report of two parts is not taken in after {most_seconds:g} s")
                break
            await reporter.keep_alive()
            await asyncio.sleep(0.2)
        outcome.said.append(f"a report took {time.monotonic() - began_at:.1f} s")
        await reporter.deregister()


async def registers_for_ever(arena: Arena, outcome: Outcome) -> None:
    """Workers that register several times a second, under one name and under new ones; the report of another one must end."""
    async with arena.channel() as channel:
        again = Stranger(channel, holds_state=True)

        async def under_a_new_name() -> None:
            new = Stranger(channel, holds_state=True)
            await new.register()
            await asyncio.sleep(0.5)
            await new.deregister()

        attackers = _for_ever(again.register, 0.2), _for_ever(under_a_new_name, 0.0)
        await _next_to(arena, outcome, attackers, _report(arena, outcome, REPORT_FIRST_SECONDS + SLACK_SECONDS))
        await status_of(again.deregister())


async def reports_without_end(arena: Arena, outcome: Outcome) -> None:
    """As many reports as may state contents at the same time; the report of another worker must end."""
    async with arena.channel() as channel:
        endless = [Stranger(channel, holds_state=True) for _ in range(Limits().max_reports_at_once)]
        most = REPORT_FIRST_SECONDS + 2 * arena.lease_seconds + SLACK_SECONDS

        async def work() -> None:
            await asyncio.sleep(1.0)
            await _report(arena, outcome, most)

        await _next_to(arena, outcome, [_report_for_ever(one) for one in endless], work())
        for one in endless:
            await status_of(one.deregister())


async def hears_nothing(arena: Arena, outcome: Outcome) -> None:
    """A worker whose heartbeats arrive and that no answer reaches: Route must stop naming it."""
    async with arena.channel() as channel:
        deaf = await Stranger.begin_on(channel)
        beat = cache_pb2.KeepAliveRequest(session=deaf.session, session_key=deaf.session_key, answer_ack=0)
        route = cache_pb2.RouteRequest(root=common_pb2.Root(model_fingerprint=FINGERPRINT), tokens=bytes(4))

        async def work() -> None:
            began_at = time.monotonic()
            while (await deaf.stub.Route(route, timeout=CALL_SECONDS)).workers:
                if time.monotonic() - began_at > arena.lease_seconds + SLACK_SECONDS:
                    outcome.problems.append("Route names a worker that has acknowledged no answer for a lease")
                    break
                await asyncio.sleep(0.2)
            outcome.said.append(f"named for {time.monotonic() - began_at:.1f} s")

        async def send() -> object:
            return await deaf.stub.KeepAlive(beat, timeout=CALL_SECONDS)

        await _next_to(arena, outcome, [_for_ever(send, 0.5)], work())
        await status_of(deaf.deregister())


async def watch_next_to(arena: Arena, outcome: Outcome, num_connections: int, most_seconds: float) -> None:
    """Streams of Watch for all places, half of them unread; then one more, which must be shown something. With one connection each
    they are from the host of everybody else."""
    request = cache_pb2.WatchRequest(picture=cache_pb2.PictureOptions(interval_ms=1000, include_blocks=True))
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(arena.channel()) for _ in range(num_connections)]

        async def hold(number: int) -> None:
            call = arena.stub(channels[number % num_connections]).Watch(request)
            while await call.read() is not grpc.aio.EOF:
                if number % 2:
                    await asyncio.sleep(3600)

        async def work() -> None:
            await asyncio.sleep(1.0)
            began_at = time.monotonic()
            async with arena.channel() as channel:
                while True:
                    call = arena.stub(channel).Watch(request, timeout=CALL_SECONDS)
                    if await status_of(call.read()) is grpc.StatusCode.OK:
                        break
                    if time.monotonic() - began_at > most_seconds:
                        outcome.problems.append(f"no place for another stream after {most_seconds:.1f} s")
                        break
                    await asyncio.sleep(0.2)
                call.cancel()
            seconds = time.monotonic() - began_at
            outcome.said.append(f"{NUM_WATCHERS} streams; another one was shown something after {seconds:.1f} s")

        await _next_to(arena, outcome, [hold(number) for number in range(NUM_WATCHERS)], work())


STRANGE_NAMES: Final = ("[/x]", "[bold red]x", "\x1b]0;PWN\x07\x1b[2J", "a\nb", "\u202ex")


async def strange_names(arena: Arena, outcome: Outcome) -> None:
    """Workers named in markup and escapes: a command shows them without harm, and so does the manager's log. For every command see
    tests/cli/test_cli_hostile_names.py."""
    log = arena.cluster.processes[MANAGER].log_path
    logged = log.stat().st_size
    async with arena.channel() as channel:
        strangers = []
        for number, name in enumerate(STRANGE_NAMES):
            stranger = Stranger(channel, f"{name}{number}", model_name=f"{name} model", address=f"{name}:1")
            code = await status_of(stranger.register())
            outcome.said.append(code.name)
            if code is grpc.StatusCode.OK:
                strangers.append(stranger)
        shown = await _kvpool(arena, ("status",))
        if b"Traceback" in shown:
            outcome.problems.append(f"kvpool status ended in a traceback: {shown.decode().splitlines()[-1]}")
        if b"\x1b" in shown or b"\x07" in shown:
            outcome.problems.append("kvpool status let an escape through to the terminal")
        for stranger in strangers:
            await status_of(stranger.deregister())
    if b"\x1b" in log.read_bytes()[logged:]:
        outcome.problems.append("the manager's log has an escape of another's name in it")


async def _kvpool(arena: Arena, arguments: Sequence[str]) -> bytes:
    """What the command shows, on stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from kvpool.cli.app import main; main()", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "NO_COLOR": "1", "KVPOOL_MANAGER": arena.cluster.address()},
    )
    async with asyncio.timeout(COMMAND_SECONDS):
        return (await process.communicate())[0]


SINGLES: Final = (
    Attack("path not UTF-8, manager", partial(path_not_utf8, name=MANAGER)),
    Attack("path not UTF-8, worker", partial(path_not_utf8, name=VICTIM)),
    Attack("messages to the manager", messages_to_the_manager),
    Attack("messages to a worker", messages_to_a_worker),
    Attack("oversize", oversize),
    Attack("the manager's own epoch, claimed", partial(claim_epochs, claims=[None] * 10), costs_a_session=True),
    # After which few are left.
    Attack("epoch 2^23-1", partial(claim_epochs, claims=[(1 << 23) - 1] * 3), costs_a_session=True),
    Attack("2^24 blocks", huge_pools),
    Attack("reserve wish of 2^24", huge_wish),
    Attack("worker [/x]", strange_names),
    Attack("Register for ever", registers_for_ever, is_as_calm=True),
    Attack("reports without end", reports_without_end, is_as_calm=True),
    Attack("a worker that hears nothing", hears_nothing, is_as_calm=True),
    Attack(
        "64 streams of Watch, one connection",
        partial(watch_next_to, num_connections=1, most_seconds=SLACK_SECONDS),
        is_as_calm=True,
    ),
    Attack(
        "64 streams of Watch, 64 connections",
        partial(watch_next_to, num_connections=NUM_WATCHERS, most_seconds=TURN_SECONDS + SLACK_SECONDS),
        is_as_calm=True,
    ),
)

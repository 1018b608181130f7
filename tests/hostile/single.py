"""Attacks of one message or a few, each by name: what was seen to stop, poison or wedge a cluster.

An attack reports what it was answered, and what is wrong that the state of the cluster afterwards does not show. Sessions that the
attacker takes for its own lead its calls with all that Register has answered it; in those of others it has what Describe shows.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from kvpool.cache_service.core.manager import REPORT_FIRST_SECONDS
from kvpool.cache_service.core.messages import Limits
from kvpool.cache_service.watching.places import TURN_SECONDS
from kvpool.v1 import cache_pb2, common_pb2, worker_pb2
from tests import http2
from tests.attacks import at_manager, at_worker
from tests.cluster.cluster import MANAGER
from tests.hostile.arena import BLOCK_SIZE, CALL_SECONDS, NUM_TOKENS, VICTIM, WORKERS, Arena
from tests.hostile.fuzz import DEFECTS
from tests.hostile.services import manager_rpcs, worker_rpcs
from tests.hostile.stranger import FINGERPRINT, Stranger, registration

LARGEST: Final = (1 << 64) - 1
GROWTH_BYTES: Final = 96 << 20
"""What one message, or a handful, may add to a process at its highest: 16 MiB are held several times on their way."""
CPU_SHARE: Final = 0.5
"""Of one core, that a process may use next to an attack that repeats itself."""
SLACK_SECONDS: Final = 4.0
"""On a busy machine."""
NUM_WATCHERS: Final = 64
"""Places for streams of Watch, by default."""
LOOK_SECONDS: Final = 15.0
COMMAND_SECONDS: Final = 60.0


@dataclass
class Outcome:
    """What came of an attack."""

    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Attack = Callable[[Arena, Outcome], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Single:
    """An attack by name."""

    name: str
    attack: Attack
    costs_a_session: bool = False
    """The cluster may have to wait for leases until it is as before."""
    is_as_calm: bool = False
    """The good client's calls take no longer than next to no attack, at the 99th percentile less than twice as long."""

    async def run(self, arena: Arena, outcome: Outcome) -> None:
        """Do it. What ends it early is part of the outcome."""
        try:
            await self.attack(arena, outcome)
        except grpc.aio.AioRpcError as error:
            outcome.problems.append(f"a call that should work did not: {error.code().name}: {error.details()}")
        except (OSError, TimeoutError) as error:
            outcome.problems.append(f"could not connect: {error!r}")


async def _status(call: Awaitable[object]) -> grpc.StatusCode:
    """What the call is answered."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def peak_bytes(pid: int) -> int:
    """The most that the process ever had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


class _Memory:
    """How far attacks push up the highest memory of a process."""

    def __init__(self, arena: Arena, name: str) -> None:
        self._process = arena.cluster.processes[name]
        # Let the peak begin at what it has now; the kernel counts on from there.
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        self._before = self._process.resident_bytes

    def judge(self, outcome: Outcome) -> None:
        """Note how much it was, and whether that is too much."""
        if self._process.status is not None:
            return
        grown = peak_bytes(self._process.pid) - self._before
        outcome.said.append(f"{self._process.name} grew by up to {grown >> 20} MiB")
        if grown > GROWTH_BYTES:
            outcome.problems.append(f"{self._process.name} grew by {grown >> 20} MiB, more than {GROWTH_BYTES >> 20}")


# -- requests that are none


async def _path(arena: Arena, outcome: Outcome, name: str) -> None:
    async with await http2.Connection.connect(arena.cluster.address(name)) as connection:
        await connection.send(http2.PREFACE, http2.settings(), http2.call(b"/\xff", b""))
        closed = await connection.read_until_end(0.5)
    outcome.said.append(f"connection {'closed' if closed else 'left open'}")


async def path_at_manager(arena: Arena, outcome: Outcome) -> None:
    """A `:path` that is not UTF-8."""
    await _path(arena, outcome, MANAGER)


async def path_at_worker(arena: Arena, outcome: Outcome) -> None:
    """The same at a worker."""
    await _path(arena, outcome, VICTIM)


async def oversize(arena: Arena, outcome: Outcome) -> None:
    """Messages over the transport's limit and at it, one that claims to be of 4 GiB, and one that is 48 MiB once unpacked."""
    for name, rpcs, method in ((MANAGER, manager_rpcs(), "Route"), (VICTIM, worker_rpcs(), "Generate")):
        rpc = next(rpc for rpc in rpcs if rpc.name == method)
        path = rpc.path
        memory = _Memory(arena, name)
        async with arena.channel(name) as channel:
            for size in ((16 << 20) + 1, 48 << 20, (16 << 20) - 64):
                # Field 99, which no message has: a parser would keep it.
                payload = b"\x9a\x06" + _varint(size) + bytes(size)
                code = await _status(rpc.call(channel, payload, CALL_SECONDS))
                outcome.said.append(f"{size >> 20} MiB to {name}: {code.name}")
                if code is grpc.StatusCode.OK or code in DEFECTS:
                    outcome.problems.append(f"{size:,} bytes to {path} were answered {code.name}")
        async with await http2.Connection.connect(arena.cluster.address(name)) as connection:
            claim = http2.message(b"", length=LARGEST & 0xFFFFFFFF)
            await connection.send(http2.PREFACE, http2.settings(), http2.headers(http2.request_headers(path.encode())))
            await connection.send(http2.data(claim, flags=0))
            await connection.read_until_end(0.3)
        async with await http2.Connection.connect(arena.cluster.address(name)) as connection:
            head = http2.headers(http2.request_headers(path.encode(), further=[(b"grpc-encoding", b"gzip")]))
            # Under 64 KiB, so that it fits the window that a connection begins with.
            bomb = http2.message(gzip.compress(bytes(48 << 20)), compressed=1)
            await connection.send(http2.PREFACE, http2.settings(), head)
            for at in range(0, len(bomb), 1 << 14):
                await connection.send(http2.data(bomb[at : at + (1 << 14)], flags=http2.Flag.NONE))
            await connection.read_until_end(0.3)
        memory.judge(outcome)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes((*encoded, value))


# -- messages of the table, while a stream runs

_LONG: Final = worker_pb2.StopConditions(max_tokens=300, ignore_eos=True)
"""Of a stream that Describe shows while it runs."""


async def _own(arena: Arena, channel: grpc.aio.Channel, **fields: Any) -> Stranger:
    """A session of the attacker's own, whose key, if there are keys, it tries on the sessions of others."""
    stranger = Stranger(channel, **fields)
    await stranger.register()
    return stranger


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


async def _judge_message(outcome: Outcome, name: str, wanted: grpc.StatusCode, call: Awaitable[object]) -> None:
    code = await _status(call)
    if code is not wanted:
        outcome.problems.append(f"{name} was answered {code.name}, not {wanted.name}")


async def messages_to_the_manager(arena: Arena, outcome: Outcome) -> None:
    """In the session of another, with impossible numbers, in another's name, and bytes: refused, with a line of the log at most."""
    lines = arena.cluster.processes[MANAGER].log.count("\n")

    async def attack(worker: cache_pb2.WorkerDescription) -> None:
        async with arena.channel() as channel:
            own = await _own(arena, channel)
            scene = at_manager.Scene(
                channel, worker, own.registered.session, own.registered.session_key, registration("one more")
            )
            # Those that could end the stream first, so that they come while it runs.
            for one in at_manager.ALL:
                await _judge_message(outcome, one.name, one.code, one.send(scene))
            await own.deregister()

    await _during_a_stream(arena, outcome, attack)
    added = arena.cluster.processes[MANAGER].log.count("\n") - lines
    outcome.said.append(f"{len(at_manager.ALL)} messages, {added} log lines")
    if added > len(at_manager.ALL):
        outcome.problems.append(f"the manager logged {added} lines")


async def messages_to_a_worker(arena: Arena, outcome: Outcome) -> None:
    """Bytes, and a text that it refuses before it is tokenised: memory shows it, on a fast machine too."""
    memory, lines = _Memory(arena, VICTIM), arena.cluster.processes[VICTIM].log.count("\n")
    async with arena.channel(VICTIM) as channel:
        for one in at_worker.ALL:
            call: Any = channel.unary_unary(one.path)
            await _judge_message(outcome, one.name, one.code, call(one.payload(), timeout=COMMAND_SECONDS))
    added = arena.cluster.processes[VICTIM].log.count("\n") - lines
    outcome.said.append(f"{len(at_worker.ALL)} messages, {added} log lines")
    if added > len(at_worker.ALL):
        outcome.problems.append(f"the worker logged {added} lines")
    memory.judge(outcome)


# -- registrations


async def own_epoch(arena: Arena, outcome: Outcome) -> None:
    """Claims, again and again, to have seen the manager's epoch in another life. Others may lose their session at most once per
    lease, the bound of a manager that began without a state file."""
    await _claim_epochs(arena, outcome, [None] * 10)


async def largest_epoch(arena: Arena, outcome: Outcome) -> None:
    """Claims to have seen an epoch after which few are left."""
    await _claim_epochs(arena, outcome, [(1 << 23) - 1] * 3)


async def _claim_epochs(arena: Arena, outcome: Outcome, claims: Sequence[int | None]) -> None:
    began_at, before = time.monotonic(), (await arena.describe()).epoch
    sessions = {name: {(await arena.described(name)).session} for name in WORKERS}
    async with arena.channel() as channel:
        for claim in claims:
            epoch = (await arena.describe()).epoch if claim is None else claim
            request = registration(highest_epoch_seen=epoch)
            outcome.said.append((await _status(arena.stub(channel).Register(request, timeout=CALL_SECONDS))).name)
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
    memory = _Memory(arena, MANAGER)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(arena.channel())
        codes = []
        for number in range(8):
            stranger = Stranger(channel, f"huge-{number}", num_blocks=1 << 24)
            codes.append(await _status(stranger.register()))
            if codes[-1] is grpc.StatusCode.OK:
                stack.push_async_callback(_status, stranger.deregister())
        outcome.said.append(", ".join(sorted({code.name for code in codes})))
        memory.judge(outcome)


async def huge_wish(arena: Arena, outcome: Outcome) -> None:
    """One call that wishes for a reserve of 2^24 blocks; its reply must come, and so must that to the next heartbeat."""
    memory = _Memory(arena, MANAGER)
    async with arena.channel() as channel:
        stranger = Stranger(channel, num_blocks=1 << 24)
        code = await _status(stranger.register())
        outcome.said.append(f"Register: {code.name}")
        if code is not grpc.StatusCode.OK:
            return
        wish = cache_pb2.ReserveWish(tier=common_pb2.TIER_DEVICE, num_blocks=1 << 24)
        request = cache_pb2.AppendRequest(uplink=stranger.uplink(reserve_wishes=[wish]))
        code = await _status(stranger.stub.Append(request, timeout=60.0))
        outcome.said.append(f"Append: {code.name}")
        beat = cache_pb2.KeepAliveRequest()
        stranger.led(beat)
        after = await _status(stranger.stub.KeepAlive(beat, timeout=60.0))
        outcome.said.append(f"KeepAlive: {after.name}")
        for what, found in (("Append", code), ("KeepAlive", after)):
            # A call that was executed and whose reply cannot be sent is the one thing that may not be.
            if found not in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
                outcome.problems.append(f"{what} was answered {found.name}: its reply could not be sent")
        memory.judge(outcome)
        await _status(stranger.deregister())


# -- the same for ever


class _Cpu:
    """CPU time of a process during an attack, the good client's calls included."""

    def __init__(self, arena: Arena, name: str) -> None:
        self._process = arena.cluster.processes[name]
        self._began_at = time.monotonic()
        self._before = self._seconds()

    def _seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def judge(self, outcome: Outcome) -> None:
        """Note how much it was, and whether that is too much."""
        if self._process.status is not None:
            return
        used, most = self._seconds() - self._before, 1.0 + CPU_SHARE * (time.monotonic() - self._began_at)
        outcome.said.append(f"{self._process.name} used {used:.1f} s of CPU")
        if used > most:
            outcome.problems.append(f"{self._process.name} used {used:.1f} s of CPU, more than {most:.1f}")


async def _for_ever(step: Callable[[], Awaitable[object]], seconds: float) -> None:
    while True:
        await _status(step())
        await asyncio.sleep(seconds)


async def _next_to(
    arena: Arena, outcome: Outcome, attackers: Sequence[Coroutine[Any, Any, None]], work: Awaitable[None]
) -> None:
    """Do the work of a good peer while attackers go on, with bounds on what all of it costs the manager."""
    memory, cpu = _Memory(arena, MANAGER), _Cpu(arena, MANAGER)
    tasks = [asyncio.create_task(attacker) for attacker in attackers]
    try:
        await work
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    memory.judge(outcome)
    cpu.judge(outcome)


class _Reporter(Stranger):
    """A worker that reports what it holds, as after a restart of the manager."""

    def __init__(self, channel: grpc.aio.Channel, **fields: Any) -> None:
        super().__init__(channel, holds_state=True, **fields)
        self.part = 0

    async def next_part(self, *, last: bool = False) -> None:
        """The first is live, the others state one content each. Raises AioRpcError."""
        request = cache_pb2.ReportRequest(uplink=self.uplink(), part=self.part, live=not self.part, last=last)
        if self.part:
            run = request.contents.add(tokens=self.part.to_bytes(4, "little") * BLOCK_SIZE)
            run.root.model_fingerprint = FINGERPRINT
            run.blocks.add(group=0, tier=common_pb2.TIER_DEVICE, block_ids=[0], generations=[0])
        await self.stub.Report(request, timeout=CALL_SECONDS)
        self.part += 1

    async def keep_alive(self) -> None:
        """Raises AioRpcError."""
        request = cache_pb2.KeepAliveRequest()
        self.led(request)
        await self.stub.KeepAlive(request, timeout=CALL_SECONDS)

    async def go_on_for_ever(self) -> None:
        """As far as the first content, and then nothing but heartbeats."""
        await _status(self.register())
        while True:
            if self.part < 2:
                await _status(self.next_part())
            await _status(self.keep_alive())
            await asyncio.sleep(0.1)


async def _report(arena: Arena, outcome: Outcome, most_seconds: float) -> None:
    """A report to its end."""
    async with arena.channel() as channel:
        reporter = _Reporter(channel)
        await reporter.register()
        await reporter.next_part()
        began_at = time.monotonic()
        while await _status(reporter.next_part(last=True)) is not grpc.StatusCode.OK:
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
        again = _Reporter(channel)

        async def under_a_new_name() -> None:
            new = _Reporter(channel)
            await new.register()
            await asyncio.sleep(0.5)
            await new.deregister()

        attackers = _for_ever(again.register, 0.2), _for_ever(under_a_new_name, 0.0)
        await _next_to(arena, outcome, attackers, _report(arena, outcome, REPORT_FIRST_SECONDS + SLACK_SECONDS))
        await _status(again.deregister())


async def reports_without_end(arena: Arena, outcome: Outcome) -> None:
    """As many reports as may state contents at the same time; the report of another worker must end."""
    async with arena.channel() as channel:
        endless = [_Reporter(channel) for _ in range(Limits().max_reports_at_once)]
        most = REPORT_FIRST_SECONDS + 2 * arena.lease_seconds + SLACK_SECONDS

        async def work() -> None:
            await asyncio.sleep(1.0)
            await _report(arena, outcome, most)

        await _next_to(arena, outcome, [one.go_on_for_ever() for one in endless], work())
        for one in endless:
            await _status(one.deregister())


async def hears_nothing(arena: Arena, outcome: Outcome) -> None:
    """A worker whose heartbeats arrive and that no answer reaches: Route must stop naming it."""
    async with arena.channel() as channel:
        deaf = await _own(arena, channel)
        beat = cache_pb2.KeepAliveRequest(answer_ack=0)
        deaf.led(beat)
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
        await _status(deaf.deregister())


async def _watch_next_to(arena: Arena, outcome: Outcome, num_connections: int, most_seconds: float) -> None:
    """Streams of Watch for all places, half of them unread; then one more, which must be shown something."""
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
                    if await _status(call.read()) is grpc.StatusCode.OK:
                        break
                    if time.monotonic() - began_at > most_seconds:
                        outcome.problems.append(
                            f"no place for a stream of another connection after {most_seconds:.1f} s"
                        )
                        break
                    await asyncio.sleep(0.2)
                call.cancel()
            outcome.said.append(
                f"{NUM_WATCHERS} streams; another one was shown something after {time.monotonic() - began_at:.1f} s"
            )

        await _next_to(arena, outcome, [hold(number) for number in range(NUM_WATCHERS)], work())


async def watches_over_one_connection(arena: Arena, outcome: Outcome) -> None:
    """As many streams of Watch as there are places."""
    await _watch_next_to(arena, outcome, 1, SLACK_SECONDS)


async def watches_over_many_connections(arena: Arena, outcome: Outcome) -> None:
    """Each over a connection of its own, from the host of everybody else."""
    await _watch_next_to(arena, outcome, NUM_WATCHERS, TURN_SECONDS + SLACK_SECONDS)


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
            code = await _status(stranger.register())
            outcome.said.append(code.name)
            if code is grpc.StatusCode.OK:
                strangers.append(stranger)
        shown = await _kvpool(arena, ("status",))
        if b"Traceback" in shown:
            outcome.problems.append(f"kvpool status ended in a traceback: {shown.decode().splitlines()[-1]}")
        if b"\x1b" in shown or b"\x07" in shown:
            outcome.problems.append("kvpool status let an escape through to the terminal")
        for stranger in strangers:
            await _status(stranger.deregister())
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
    Single("path not UTF-8, manager", path_at_manager),
    Single("path not UTF-8, worker", path_at_worker),
    Single("messages to the manager", messages_to_the_manager),
    Single("messages to a worker", messages_to_a_worker),
    Single("oversize", oversize),
    Single("the manager's own epoch, claimed", own_epoch, costs_a_session=True),
    Single("epoch 2^23-1", largest_epoch, costs_a_session=True),
    Single("2^24 blocks", huge_pools),
    Single("reserve wish of 2^24", huge_wish),
    Single("worker [/x]", strange_names),
    Single("Register for ever", registers_for_ever, is_as_calm=True),
    Single("reports without end", reports_without_end, is_as_calm=True),
    Single("a worker that hears nothing", hears_nothing, is_as_calm=True),
    Single("64 streams of Watch, one connection", watches_over_one_connection, is_as_calm=True),
    Single("64 streams of Watch, 64 connections", watches_over_many_connections, is_as_calm=True),
)

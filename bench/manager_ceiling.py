"""What one manager process can do at most: pairs of Allocate and Free a second over real gRPC, and the CPU time of each pair.

python -m bench.manager_ceiling [--seconds S] [--only CASE ...] [--json]

The manager is the real process. The workers are light: they build requests, send them, and do not parse the replies, one call in
flight for each, as the protocol has it. A pair allocates a prompt of its own and frees it with all of it computed, so its
blocks stay as cache until another prompt takes them. The reference is the same calls without gRPC, in the same run: from the
bytes of a request to the bytes of its reply through the manager's codec and core. The rest is the transport's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import structlog
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from bench.report import facts, progress
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.epoch import EpochStore
from kvpool.cache_service.servicer import CacheServicer
from kvpool.client.cli.launch.children import ChildSpec, Supervisor
from kvpool.client.cli.launch.cluster import free_port
from kvpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2

BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 8193
"""Of each worker: enough for its prompts in flight, and soon full of cached ones."""
NUM_TOKENS: Final = 512
LEASE_SECONDS: Final = 3600.0
"""The workers send no heartbeats."""
WARM_UP_SECONDS: Final = 1.0
START_SECONDS: Final = 60.0
_SERVICE: Final = "/kvpool.v1.CacheService/"


class Case(NamedTuple):
    """How the pairs come."""

    num_workers: int
    num_items: int = 1
    """Of one Allocate and of one Free."""
    num_tokens: int = NUM_TOKENS
    is_shared: bool = False
    """All prompts of a worker are one."""

    @property
    def name(self) -> str:
        """As --only takes it."""
        name = f"{self.num_workers}x{self.num_items}"
        if self.num_tokens != NUM_TOKENS:
            name += f"-{self.num_tokens}"
        return f"{name}-same" if self.is_shared else name


CASES: Final = (
    *(Case(count) for count in (1, 8, 16, 32, 64)),
    Case(16, num_items=8),
    Case(16, num_tokens=8192),
    Case(64, is_shared=True),
)


@dataclass(frozen=True)
class Measured:
    """Of one case."""

    case: str
    pairs_per_second: float
    call_ms_p50: float
    call_ms_p99: float
    cpu_us_per_pair: float
    """Of the manager's process."""
    alone_us_per_pair: float
    """CPU time of the same without gRPC."""

    @property
    def ratio(self) -> float:
        """What a pair over gRPC costs of one without."""
        return self.cpu_us_per_pair / self.alone_us_per_pair


class Pairs:
    """The requests of one worker, pair after pair."""

    def __init__(self, case: Case, number: int) -> None:
        self._case = case
        self._number = number
        self._tokens = array("I", range(1, case.num_tokens)).tobytes()
        self._numbers = itertools.count(1)
        self._uplink = cache_pb2.Uplink()

    def registration(self) -> cache_pb2.RegisterRequest:
        """The worker's introduction."""
        config = common_pb2.KVCacheConfig(block_size=BLOCK_SIZE)
        config.groups.add(group=0).full_attention.SetInParent()
        config.pools.add(group=0, tier=common_pb2.TIER_DEVICE, num_blocks=NUM_BLOCKS)
        return cache_pb2.RegisterRequest(
            worker_id=f"bench-{self._number}",
            incarnation=time.time_ns(),
            register_no=1,
            address="127.0.0.1:1",
            model_fingerprint="bench",
            kv_cache_config=config,
        )

    def begin(self, registered: cache_pb2.RegisterResponse) -> None:
        """What Register answered leads every call: the session, and whatever else an uplink has of it."""
        for field in registered.DESCRIPTOR.fields:
            if field.name in self._uplink.DESCRIPTOR.fields_by_name:
                setattr(self._uplink, field.name, getattr(registered, field.name))

    def next_pair(self) -> tuple[cache_pb2.AllocateRequest, Callable[[], cache_pb2.FreeRequest]]:
        """Both requests of one pair; the second is made when it is sent."""
        numbers = [next(self._numbers) for _ in range(self._case.num_items)]
        keys = [common_pb2.SequenceKey(sequence_id=f"{self._number}-{number}", attempt=1) for number in numbers]
        root = common_pb2.Root(model_fingerprint="bench")
        request = cache_pb2.AllocateRequest(uplink=self._next_uplink())
        for key, number in zip(keys, numbers, strict=True):
            first = 0 if self._case.is_shared else number << 7 | self._number
            tokens = first.to_bytes(4, "little") + self._tokens
            request.items.add(key=key, root=root, tokens=tokens, max_new_tokens=1, no_wait=True)

        def free() -> cache_pb2.FreeRequest:
            update = cache_pb2.SequenceUpdate(num_computed_tokens=self._case.num_tokens)
            ended = cache_pb2.FreeRequest(uplink=self._next_uplink())
            for key in keys:
                ended.items.add(update=update).update.key.CopyFrom(key)
            return ended

        return request, free

    def _next_uplink(self) -> cache_pb2.Uplink:
        self._uplink.call_no += 1
        return self._uplink


# -- over gRPC


class _Manager(NamedTuple):
    address: str
    pid: int

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def _manager() -> AsyncIterator[_Manager]:
    port = free_port()
    started = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        flags = ["--port", str(port), "--state-dir", folder, "--lease-seconds", str(LEASE_SECONDS)]
        # The process prints its own number: the supervisor does not hand it on.
        program = "import os, runpy; print('pid', os.getpid(), flush=True); "
        program += "runpy.run_module('kvpool.cache_service', run_name='__main__')"
        pids: list[int] = []

        def on_line(name: str, line: str) -> None:
            if line.startswith("pid "):
                pids.append(int(line.split()[1]))
            elif "listening" in line:
                started.set()

        async with Supervisor(on_line) as supervisor, asyncio.timeout(None) as limit:
            await supervisor.start(ChildSpec("manager", [sys.executable, "-c", program, *flags]))
            limit.reschedule(asyncio.get_running_loop().time() + START_SECONDS)
            await started.wait()
            limit.reschedule(None)
            yield _Manager(f"127.0.0.1:{port}", pids[0])


async def _over_grpc(case: Case, manager: _Manager, seconds: float) -> tuple[float, list[float], float]:
    """Pairs a second, milliseconds of each call, and CPU microseconds of a pair."""
    times: list[float] = []
    num_pairs = 0
    ends_at = float("inf")

    async def work(channel: grpc.aio.Channel, pairs: Pairs) -> None:
        nonlocal num_pairs
        # Replies are not parsed: the workers are not what is measured. That all was granted is looked up in the end.
        allocate: Any = channel.unary_unary(f"{_SERVICE}Allocate", request_serializer=_serialised)
        free: Any = channel.unary_unary(f"{_SERVICE}Free", request_serializer=_serialised)
        while time.perf_counter() < ends_at:
            request, ending = pairs.next_pair()
            began = time.perf_counter()
            await allocate(request, timeout=30.0)
            between = time.perf_counter()
            await free(ending(), timeout=30.0)
            times.extend((1000 * (between - began), 1000 * (time.perf_counter() - between)))
            num_pairs += case.num_items

    async with AsyncExitStack() as stack:
        channels, workers = [], []
        for number in range(case.num_workers):
            # Each worker has a connection of its own, as those of other machines have.
            options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 16 << 20))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(manager.address, options=options))
            pairs = Pairs(case, number)
            pairs.begin(await cache_pb2_grpc.CacheServiceStub(channel).Register(pairs.registration()))
            channels.append(channel)
            workers.append(pairs)
        working = [asyncio.create_task(work(*one)) for one in zip(channels, workers, strict=True)]
        await asyncio.sleep(WARM_UP_SECONDS)
        times.clear()
        num_before, cpu_before, began = num_pairs, manager.cpu_seconds(), time.perf_counter()
        await asyncio.sleep(seconds)
        took, cpu, done = time.perf_counter() - began, manager.cpu_seconds() - cpu_before, num_pairs - num_before
        ends_at = 0.0
        await asyncio.gather(*working)
        await _look_up(cache_pb2_grpc.CacheServiceStub(channels[0]), case, num_pairs)
    return done / took, times, cpu / done * 1e6


def _serialised(message: Message) -> bytes:
    return message.SerializeToString()


async def _look_up(stub: cache_pb2_grpc.CacheServiceStub, case: Case, num_pairs: int) -> None:
    """Every prompt was granted, and every block has come back."""
    workers = (await stub.Describe(cache_pb2.DescribeRequest())).workers
    num_tokens = sum(worker.totals.num_prompt_tokens for worker in workers)
    assert num_tokens == num_pairs * case.num_tokens, f"{num_tokens} tokens granted for {num_pairs} pairs"
    assert all(counts.held == 0 for worker in workers for counts in worker.counts), (
        "blocks are held after the last Free"
    )


# -- without gRPC


class _NoContext:
    """In place of a call's context; a call that is refused is a defect of the benchmark."""

    def set_code(self, code: grpc.StatusCode) -> None:
        raise AssertionError(f"refused: {code}")


def _run(coroutine: Coroutine[Any, Any, Message]) -> Message:
    """A method of the servicer that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        reply: Message = ended.value
        return reply
    raise AssertionError("it waits for something")


def _alone(case: Case, num_calls: int, epochs: EpochStore) -> float:
    """CPU microseconds of a pair from request bytes to reply bytes, with the collector off as in the manager's process."""
    manager = CacheManager(epochs.epoch, lease_seconds=LEASE_SECONDS)
    servicer: Any = CacheServicer(manager, epochs, keep_alive_seconds=1.0, clock=time.monotonic)
    context = _NoContext()
    workers = []
    for number in range(case.num_workers):
        pairs = Pairs(case, number)
        pairs.begin(asyncio.run(servicer.Register(pairs.registration(), context)))
        workers.append(pairs)
    spent: list[float] = []
    gc.disable()
    for number in range(num_calls):
        request, ending = workers[number % len(workers)].next_pair()
        payload = request.SerializeToString()
        began = time.thread_time()
        _run(servicer.Allocate(cache_pb2.AllocateRequest.FromString(payload), context)).SerializeToString()
        between = time.thread_time()
        payload = ending().SerializeToString()
        resumed = time.thread_time()
        _run(servicer.Free(cache_pb2.FreeRequest.FromString(payload), context)).SerializeToString()
        spent.append(between - began + time.thread_time() - resumed)
    gc.enable()
    half = spent[len(spent) // 2 :]  # from a pool that is full on
    return 1e6 * sum(half) / len(half) / case.num_items


async def _measure(case: Case, seconds: float) -> tuple[float, list[float], float]:
    async with _manager() as manager:
        return await _over_grpc(case, manager, seconds)


def measure(case: Case, seconds: float) -> Measured:
    """One case, with a manager of its own."""
    progress(f"{case.name}: {case.num_workers} workers, {case.num_items} items of {case.num_tokens} tokens")
    pairs_per_second, times, cpu = asyncio.run(_measure(case, seconds))
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        epochs = EpochStore.open(Path(folder))
        try:
            # Enough to fill the pools twice, so that most calls evict, and to last for a while.
            fills = 2 * case.num_workers * NUM_BLOCKS * BLOCK_SIZE // (case.num_tokens * case.num_items)
            alone = _alone(case, min(20_000, max(2_000, fills)), epochs)
        finally:
            epochs.close()
    quantiles = statistics.quantiles(times, n=100)
    return Measured(case.name, pairs_per_second, quantiles[49], quantiles[98], cpu, alone)


def show(found: list[Measured]) -> None:
    """For people."""
    table = Table("workers x items", box=None, pad_edge=False)
    for column in ("pairs/s", "call p50", "p99", "CPU of a pair", "core and codec alone", "ratio"):
        table.add_column(column, justify="right")
    for one in found:
        times = (f"{one.call_ms_p50:.1f} ms", f"{one.call_ms_p99:.1f} ms")
        cpu = (f"{one.cpu_us_per_pair:.0f} µs", f"{one.alone_us_per_pair:.0f} µs", f"{one.ratio:.1f}")
        table.add_row(one.case, f"{one.pairs_per_second:,.0f}", *times, *cpu)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--seconds", type=float, default=5.0, help="that each case is measured for (default 5)")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="CASE", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    arguments = parser.parse_args()
    if arguments.seconds < 1:
        parser.error("--seconds must be at least 1: CPU time is counted in hundredths of a second")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    found = [measure(case, arguments.seconds) for case in CASES if case.name in arguments.only]
    if arguments.json:
        cases = [{**asdict(one), "ratio": one.ratio} for one in found]
        print(json.dumps({"cases": cases, "facts": facts("grpcio", "protobuf")}))
    else:
        show(found)
        print(facts("grpcio", "protobuf"))


if __name__ == "__main__":
    main()

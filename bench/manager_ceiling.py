"""The throughput limit of one manager process: pairs of Allocate and Free per second over real gRPC, and the CPU time of a pair.

python -m bench.manager_ceiling [--seconds S] [--only CASE ...] [--json]

The manager is the real process. The workers are light: they build and send requests and do not parse replies, one call in flight
each, as in the protocol. A pair allocates a new prompt and frees it with all tokens computed, so its blocks stay cached until
another prompt takes them. The reference is the same calls without gRPC, in the same run: from the bytes of a request to the bytes
of its reply through the manager's codec and core. The rest is the transport.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import structlog
from google.protobuf.message import Message
from rich.table import Table

from bench.local_stub import LocalContext
from bench.our_cluster import OurCluster
from bench.registration import register_request
from bench.replay import FINGERPRINT
from bench.report import command_line, facts, print_table, progress
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.servicer import CacheServicer
from kvpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2

BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 8193
"""Per worker: enough for its prompts in flight, and soon full of cached ones."""
NUM_TOKENS: Final = 512
LEASE_SECONDS: Final = 3600.0
"""The workers send no heartbeats."""
ENVIRONMENT: Final = {"KVPOOL_MANAGER_LEASE_SECONDS": str(LEASE_SECONDS)}
WARM_UP_SECONDS: Final = 1.0
_SERVICE: Final = "/kvpool.v1.CacheService/"


class Case(NamedTuple):
    """The load."""

    num_workers: int
    num_items: int = 1
    """Sequences in each Allocate and Free."""
    num_tokens: int = NUM_TOKENS
    is_shared: bool = False
    """All prompts are the same."""

    @property
    def name(self) -> str:
        """The name for --only."""
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
    """The figures of one case."""

    case: str
    pairs_per_second: float
    call_ms_p50: float
    call_ms_p99: float
    cpu_us_per_pair: float
    """CPU time of the manager's process."""
    alone_us_per_pair: float
    """CPU time without gRPC."""

    @property
    def ratio(self) -> float:
        """CPU time with gRPC over that without."""
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
        return register_request(f"bench-{self._number}", time.time_ns(), BLOCK_SIZE, NUM_BLOCKS)

    def begin(self, registered: cache_pb2.RegisterResponse) -> None:
        """Copy the fields of Register's reply that an uplink has, e.g. the session."""
        for field in registered.DESCRIPTOR.fields:
            if field.name in self._uplink.DESCRIPTOR.fields_by_name:
                setattr(self._uplink, field.name, getattr(registered, field.name))

    def next_pair(self) -> tuple[cache_pb2.AllocateRequest, Callable[[], cache_pb2.FreeRequest]]:
        """Both requests of one pair; the second is built when it is sent."""
        numbers = [next(self._numbers) for _ in range(self._case.num_items)]
        keys = [common_pb2.SequenceKey(sequence_id=f"{self._number}-{number}", attempt=1) for number in numbers]
        root = common_pb2.Root(model_fingerprint=FINGERPRINT)
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


async def _over_grpc(case: Case, manager: OurCluster, seconds: float) -> tuple[float, list[float], float]:
    """Pairs a second, milliseconds of each call, and CPU microseconds of a pair."""
    times: list[float] = []
    num_pairs = 0
    ends_at = float("inf")

    async def work(channel: grpc.aio.Channel, pairs: Pairs) -> None:
        nonlocal num_pairs
        # Replies are not parsed: the workers are not measured. _look_up checks at the end that all was granted.
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
            # Each worker has its own connection, as workers on other machines have.
            options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 16 << 20))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(manager.address, options=options))
            pairs = Pairs(case, number)
            pairs.begin(await cache_pb2_grpc.CacheServiceStub(channel).Register(pairs.registration()))
            channels.append(channel)
            workers.append(pairs)
        working = [asyncio.create_task(work(*one)) for one in zip(channels, workers, strict=True)]
        await asyncio.sleep(WARM_UP_SECONDS)
        times.clear()
        cpu_before = await manager.manager_cpu_seconds()
        num_before, began = num_pairs, time.perf_counter()
        await asyncio.sleep(seconds)
        cpu = await manager.manager_cpu_seconds() - cpu_before
        took, done = time.perf_counter() - began, num_pairs - num_before
        ends_at = 0.0
        await asyncio.gather(*working)
        await _look_up(cache_pb2_grpc.CacheServiceStub(channels[0]), case, num_pairs)
    return done / took, times, cpu / done * 1e6


def _serialised(message: Message) -> bytes:
    return message.SerializeToString()


async def _look_up(stub: cache_pb2_grpc.CacheServiceStub, case: Case, num_pairs: int) -> None:
    """Assert that every prompt was granted, and every block freed."""
    workers = (await stub.Describe(cache_pb2.DescribeRequest())).workers
    num_tokens = sum(worker.totals.num_prompt_tokens for worker in workers)
    assert num_tokens == num_pairs * case.num_tokens, f"{num_tokens} tokens granted for {num_pairs} pairs"
    assert all(counts.held == 0 for worker in workers for counts in worker.counts), (
        "blocks are held after the last Free"
    )


# -- without gRPC


def _run(coroutine: Coroutine[Any, Any, Message]) -> Message:
    """Run a method of the servicer that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        reply: Message = ended.value
        return reply
    raise AssertionError("the method awaits something")


def _alone(case: Case, num_calls: int, epochs: FileEpochs) -> float:
    """CPU microseconds of a pair from request bytes to reply bytes, with the collector off as in the manager's process."""
    manager = CacheManager(epochs.epoch, lease_seconds=LEASE_SECONDS)
    servicer: Any = CacheServicer(manager, epochs, keep_alive_seconds=1.0, clock=time.monotonic)
    context = LocalContext()
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
    half = spent[len(spent) // 2 :]  # the pool is full by then
    return 1e6 * sum(half) / len(half) / case.num_items


async def _measure(case: Case, seconds: float) -> tuple[float, list[float], float]:
    async with OurCluster(num_workers=0, environment=ENVIRONMENT) as manager:
        return await _over_grpc(case, manager, seconds)


def measure(case: Case, seconds: float) -> Measured:
    """One case, with a manager of its own."""
    progress(f"{case.name}: {case.num_workers} workers, {case.num_items} items of {case.num_tokens} tokens")
    pairs_per_second, times, cpu = asyncio.run(_measure(case, seconds))
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        epochs = FileEpochs.open(Path(folder))
        try:
            # Enough to fill the pools twice, so that most calls evict, and to take a while.
            fills = 2 * case.num_workers * NUM_BLOCKS * BLOCK_SIZE // (case.num_tokens * case.num_items)
            alone = _alone(case, min(20_000, max(2_000, fills)), epochs)
        finally:
            epochs.close()
    quantiles = statistics.quantiles(times, n=100)
    return Measured(case.name, pairs_per_second, quantiles[49], quantiles[98], cpu, alone)


def show(found: list[Measured]) -> None:
    """Print a table."""
    table = Table("workers x items", box=None, pad_edge=False)
    for column in ("pairs/s", "call p50", "p99", "CPU of a pair", "core and codec alone", "ratio"):
        table.add_column(column, justify="right")
    for one in found:
        times = (f"{one.call_ms_p50:.1f} ms", f"{one.call_ms_p99:.1f} ms")
        cpu = (f"{one.cpu_us_per_pair:.0f} µs", f"{one.alone_us_per_pair:.0f} µs", f"{one.ratio:.1f}")
        table.add_row(one.case, f"{one.pairs_per_second:,.0f}", *times, *cpu)
    print_table(table)


def main() -> None:
    parser = command_line(__doc__, runs=None)
    names = [case.name for case in CASES]
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each case (default 5)")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="CASE", help=f"of {', '.join(names)}"
    )
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

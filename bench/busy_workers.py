"""How many busy workers one manager carries: their calls over real gRPC, and how long these take.

python -m bench.busy_workers [--workers N ...] [--seconds N] [--json]

Each worker generates 5,000 tokens a second: 20 requests a second with prompts of 1,000 tokens and answers of 256, each with a
Route, an Allocate and a Free; an Append every 0.1 s states the blocks that its sequences have filled, and asks for the next ones; a
KeepAlive every second. There is no engine: the calls are made by one process that does nothing else. What is measured is how long a
call takes from its sender to its answer; a call is late if its sender was.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from rich.table import Table

from bench.managers import managers
from bench.registration import register_request
from bench.replay import FINGERPRINT
from bench.report import command_line, cpu_seconds, facts, print_table, progress
from kvpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2

TOKENS_PER_SECOND: Final = 5000
PROMPT_TOKENS: Final = 1000
ANSWER_TOKENS: Final = 256
ANSWER_SECONDS: Final = 5.0
"""From a request's first token to its last: 51 tokens a second."""
APPEND_SECONDS: Final = 0.1
BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 20_000
MOST_P99_SECONDS: Final = 0.05
WARM_UP_SECONDS: Final = ANSWER_SECONDS + 1.0


@dataclass
class _Sequence:
    key: common_pb2.SequenceKey
    began_at: float
    num_stated: int = PROMPT_TOKENS
    """Tokens that the manager knows."""
    num_entries: int = 0


@dataclass
class _Load:
    """Of one process: the times of its calls by method."""

    stub: cache_pb2_grpc.CacheServiceStub
    seconds: dict[str, list[float]] = field(default_factory=dict)
    num_late: int = 0
    is_counted: bool = False

    async def call(self, name: str, request: Any) -> Any:
        """Make a call and note how long it took."""
        began = time.perf_counter()
        answer = await getattr(self.stub, name)(request, timeout=30)
        if self.is_counted:
            self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return answer


class _Worker:
    """Makes the calls of one busy worker."""

    def __init__(self, load: _Load, index: int) -> None:
        self._load = load
        self._name = f"w{index}"
        self._random = random.Random(index)
        self._sequences: list[_Sequence] = []
        self._num_requests = 0
        self._call_no = 0
        self._lock = asyncio.Lock()
        """One call on the link at a time."""

    async def register(self) -> None:
        """Begin the session."""
        request = register_request(self._name, 1, BLOCK_SIZE, NUM_BLOCKS)
        answer = await self._load.call("Register", request)
        self._session, self._key = answer.session, answer.session_key

    def _uplink(self) -> cache_pb2.Uplink:
        self._call_no += 1
        return cache_pb2.Uplink(session=self._session, session_key=self._key, call_no=self._call_no)

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.sleep(self._random.random())
        await asyncio.gather(
            self._repeat(ANSWER_TOKENS / TOKENS_PER_SECOND, self._begin),
            self._repeat(APPEND_SECONDS, self._state),
            self._repeat(1.0, self._beat),
        )

    async def _repeat(self, pause: float, what: Callable[[], Awaitable[None]]) -> None:
        due = time.perf_counter()
        while True:
            await what()
            due += pause
            now = time.perf_counter()
            if now > due:
                self._load.num_late += self._load.is_counted
                due = now
            await asyncio.sleep(due - now)

    async def _begin(self) -> None:
        """One request comes, and another one has ended."""
        self._num_requests += 1
        # A tenth of them go on from one of a few beginnings.
        first = self._random.randrange(8) if self._random.random() < 0.1 else 1000 + self._random.getrandbits(20)
        tokens = array("I", [first, *range(1, PROMPT_TOKENS)]).tobytes()
        root = common_pb2.Root(model_fingerprint=FINGERPRINT)
        await self._load.call("Route", cache_pb2.RouteRequest(root=root, tokens=tokens, max_workers=3))
        key = common_pb2.SequenceKey(sequence_id=f"{self._name} {self._num_requests}", attempt=1)
        async with self._lock:
            request = cache_pb2.AllocateRequest(uplink=self._uplink())
            request.items.add(key=key, root=root, tokens=tokens, max_new_tokens=ANSWER_TOKENS, no_wait=True)
            answer = await self._load.call("Allocate", request)
        (result,) = answer.results
        if result.HasField("granted"):
            sequence = _Sequence(key, time.perf_counter())
            sequence.num_entries = len(result.granted.tables[0].block_ids)
            self._sequences.append(sequence)
        ended = [one for one in self._sequences if time.perf_counter() - one.began_at > ANSWER_SECONDS]
        if ended:
            self._sequences = [one for one in self._sequences if one not in ended]
            async with self._lock:
                free = cache_pb2.FreeRequest(uplink=self._uplink())
                for sequence in ended:
                    free.items.add(update=_update(sequence, PROMPT_TOKENS + ANSWER_TOKENS))
                await self._load.call("Free", free)

    async def _state(self) -> None:
        """The blocks that were filled since the last time."""
        now = time.perf_counter()
        async with self._lock:
            request = cache_pb2.AppendRequest(uplink=self._uplink())
            for sequence in self._sequences:
                share = min(1.0, (now - sequence.began_at) / ANSWER_SECONDS)
                num_tokens = (PROMPT_TOKENS + int(share * ANSWER_TOKENS)) // BLOCK_SIZE * BLOCK_SIZE
                if num_tokens > sequence.num_stated:
                    request.items.add(update=_update(sequence, num_tokens), want_blocks=num_tokens // BLOCK_SIZE + 1)
                    sequence.num_stated = num_tokens
            if request.items:
                await self._load.call("Append", request)

    async def _beat(self) -> None:
        load = common_pb2.WorkerLoad(num_running=len(self._sequences))
        request = cache_pb2.KeepAliveRequest(session=self._session, session_key=self._key, load=load)
        await self._load.call("KeepAlive", request)


def _update(sequence: _Sequence, num_tokens: int) -> cache_pb2.SequenceUpdate:
    """All up to so many tokens is known and computed."""
    tokens = array("I", range(sequence.num_stated, num_tokens)).tobytes()
    return cache_pb2.SequenceUpdate(
        key=sequence.key, start=sequence.num_stated, tokens=tokens, num_computed_tokens=num_tokens
    )


async def measure(num_workers: int, seconds: float) -> dict[str, Any]:
    """So many workers, for that long."""
    async with managers(1) as running, grpc.aio.insecure_channel(running.addresses) as channel:
        load = _Load(cache_pb2_grpc.CacheServiceStub(channel))
        await load.stub.Describe(cache_pb2.DescribeRequest(), wait_for_ready=True)
        workers = [_Worker(load, index) for index in range(num_workers)]
        for worker in workers:
            await worker.register()
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        await asyncio.sleep(WARM_UP_SECONDS)
        pid = running.leader_pid()
        before, own = cpu_seconds(pid), time.process_time()
        load.is_counted = True
        began = time.perf_counter()
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        took = time.perf_counter() - began
        load.is_counted = False
        cpu, own_cpu = cpu_seconds(pid) - before, time.process_time() - own
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    calls = [one for found in load.seconds.values() for one in found]
    by_method = {
        name: statistics.quantiles(found, n=100)[98] for name, found in sorted(load.seconds.items()) if len(found) > 1
    }
    return {
        "workers": num_workers,
        "rpcs_per_second": len(calls) / took,
        "requests_per_second": len(load.seconds.get("Allocate", ())) / took,
        "p50": statistics.median(calls),
        "p99": statistics.quantiles(calls, n=100)[98],
        "p99_by_method": by_method,
        "manager_cores": cpu / took,
        "sender_cores": own_cpu / took,
        "late": load.num_late / max(1, len(calls)),
    }


def main() -> None:
    parser = command_line(__doc__, runs=None)
    parser.add_argument("--workers", type=int, nargs="+", default=[5, 10, 20, 30, 40, 50], help="(default 5 to 50)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of workers (default 10)")
    arguments = parser.parse_args()
    found = []
    for num_workers in arguments.workers:
        progress(f"{num_workers} workers")
        found.append(asyncio.run(measure(num_workers, arguments.seconds)))
    if arguments.json:
        print(json.dumps({"found": found, "facts": facts("grpcio")}))
        return
    table = Table("workers", box=None, pad_edge=False)
    for column in ("requests/s", "RPCs/s", "median, ms", "p99, ms", "cores: manager", "sender", "late, %"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            str(one["workers"]),
            f"{one['requests_per_second']:.0f}",
            f"{one['rpcs_per_second']:,.0f}",
            f"{one['p50'] * 1e3:.1f}",
            f"{one['p99'] * 1e3:.1f}",
            f"{one['manager_cores']:.2f}",
            f"{one['sender_cores']:.2f}",
            f"{100 * one['late']:.0f}",
            style=None if one["p99"] < MOST_P99_SECONDS else "bold red",
        )
    print_table(table)


if __name__ == "__main__":
    main()

"""A worker's process: the real engine, cache side, link and servicer over a fake GPU; and the machine that it runs on."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvpool.worker_service.cache.engine_cache import EngineCache
from kvpool.worker_service.cache.groups.group import Group, GroupTable
from kvpool.worker_service.cache.ledger import BlockLedger
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.engine.engine import Engine
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.policy import SchedulingPolicy
from kvpool.worker_service.engine.prompt import EncoderSettings
from kvpool.worker_service.engine.settings import EngineSettings
from kvpool.worker_service.incarnation import Identity, next_identity
from kvpool.worker_service.manager_link import ManagerLink, RegistrationRefused
from kvpool.worker_service.servicer import WorkerServicer
from kvpool.worker_service.step import Step
from tests import tracer
from tests.simulation.forker import Forker
from tests.simulation.gpu import Gpu
from tests.simulation.process import Process
from tests.simulation.rpc import Methods

if TYPE_CHECKING:
    from tests.simulation.kernel import Kernel
    from tests.simulation.world import World

FINGERPRINT = "tracer"
BLOCK_SIZE = 4
CHUNK_TOKENS = 8
"""Of one sequence in one step, with windows."""
GRACE_SECONDS = 2.0
START = 1
"""The token that every text of a decoder begins with."""
MAX_ENCODER_TOKENS = 40
MAX_MODEL_LEN = 48


@dataclass(frozen=True)
class WorkerPlan:
    """What stays the same over the lives of a worker."""

    worker_id: str
    groups: tuple[Group, ...]
    retention_interval: int
    max_num_seqs: int
    max_num_batched_tokens: int
    reserve_seconds: float
    prefix_wait_seconds: float
    report_seconds: float
    policy: SchedulingPolicy
    max_mixed_prefill_tokens: int
    max_num_waiting: int
    max_requests_of_stream: int
    fork_rate: float
    """How often a sequence that decodes is forked in a step."""

    def cache_settings(self) -> CacheSettings:
        return CacheSettings(
            block_size=BLOCK_SIZE,
            groups=self.groups,
            max_chunk_tokens=min(self.max_num_batched_tokens, CHUNK_TOKENS),
            retention_interval=self.retention_interval,
            report_seconds=self.report_seconds,
            reserve_seconds=self.reserve_seconds,
            prefix_wait_seconds=self.prefix_wait_seconds,
            no_blocks_retry_seconds=0.5,
        )


_EPOCH_SECONDS = 1_000_000.0
"""What wall clocks show at the beginning; clocks that are set back do not come to 0."""


class Machine:
    """Runs one process of its worker at a time. What is here outlives them."""

    def __init__(self, name: str, plan: WorkerPlan, kernel: Kernel) -> None:
        self.name = name
        self.plan = plan
        self.num_processes = 0
        self._kernel = kernel
        self._random: random.Random = kernel.random(f"machine {name}")
        self._ahead = self._random.uniform(0.0, 30.0)
        self._last: tuple[int, bytes] | None = None

    def begin_process(self) -> Identity:
        """As worker_service/incarnation.py does at the start; the process before has ended, as the lock on the folder proves."""
        self.num_processes += 1
        wall = _EPOCH_SECONDS + self._ahead + self._kernel.now
        identity = next_identity(self._last, int(wall * 1e9))
        # Drawn from the seed, where the worker draws from the system.
        identity = identity._replace(process_key=self._random.randbytes(16))
        self._last = identity.incarnation, identity.process_key
        return identity

    def set_back(self, seconds: float) -> None:
        self._ahead -= seconds
        self._kernel.trace(self.name, f"its wall clock is set back by {seconds:.1f} s")

    def lose_folder(self) -> None:
        """The state folder is lost, as that of a container without a volume."""
        self._last = None
        self._kernel.trace(self.name, "the state folder is lost")


class WorkerProcess(Process):
    """One life of a worker, from loading to the end."""

    def __init__(self, world: World, host: Machine) -> None:
        identity = host.begin_process()
        super().__init__(world, f"{host.name}.{host.num_processes}", host.name)
        self.host = host
        self.plan = plan = host.plan
        self.identity = identity
        self.incarnation = identity.incarnation
        self.address = f"{host.name}:1"
        self.is_leaving = False
        self.was_refused = False
        self.granted: dict[tuple[int, int], int] = {}
        """The largest generation that this process has accepted of each group's blocks since its books were last empty."""
        self.granted_in: tuple[BlockLedger, ...] | None = None
        """Those books."""
        self.cache = EngineCache(plan.cache_settings())
        self.gpu = Gpu(self, self.cache.settings)
        self.gpu.step_seconds = world.step_seconds
        self.engine = Engine(
            EngineSettings(
                model_fingerprint=FINGERPRINT,
                vocab_size=tracer.VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=tracer.EOS,
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                max_mixed_prefill_tokens=plan.max_mixed_prefill_tokens,
                scheduling_policy=plan.policy,
                max_num_waiting=plan.max_num_waiting,
                encoder=None
                if not self.cache.settings.encoder_capacity
                else EncoderSettings(MAX_ENCODER_TOKENS, tracer.VOCAB_SIZE, (START,)),
            ),
            self.cache,
            self.gpu,
            model_thread=self.gpu,  # type: ignore[arg-type]
            clock=self.loop.clock.now,
        )
        self.forker = Forker(self, plan.fork_rate)
        self.engine.scheduler.schedule = self.forker.schedule  # type: ignore[method-assign]
        self.facts = facts = worker_pb2.ModelFacts(
            facts_digest=b"facts of tracer",
            worker_id=plan.worker_id,
            model_name="tracer",
            model_fingerprint=FINGERPRINT,
            vocab_size=tracer.VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=sorted(tracer.EOS),
            is_encoder_decoder=self.cache.settings.encoder_capacity > 0,
            decoder_start_token_id=START,
            max_encoder_tokens=MAX_ENCODER_TOKENS,
        )
        methods = Methods()
        servicer = WorkerServicer(
            self.engine, facts, {}, reader_seconds=0, max_requests_of_stream=plan.max_requests_of_stream
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, methods)  # type: ignore[arg-type]
        self.handlers = methods.handlers
        self.link = ManagerLink(
            ",".join(world.manager_addresses),
            self.introduction(),
            self.engine,
            self._on_session,
            clock=self.loop.clock.now,
        )

    def introduction(self) -> cache_pb2.RegisterRequest:
        settings = self.cache.settings
        return cache_pb2.RegisterRequest(
            worker_id=self.plan.worker_id,
            incarnation=self.incarnation,
            process_key=self.identity.process_key,
            predecessor_key=self.identity.predecessor_key,
            address=self.address,
            model_name="tracer",
            model_fingerprint=FINGERPRINT,
            kv_cache_config=settings.kv_cache_config(),
            max_model_len=MAX_MODEL_LEN,
            facts_digest=self.facts.facts_digest,
            engine="simulated",
        )

    def _on_session(self, is_open: bool) -> None:
        self.kernel.trace(self.name, "serves" if is_open else "has no session")

    def boot(self) -> None:
        self.world.bus.machines[self.address] = self.machine
        self.world.bus.endpoints[self.address] = self
        self.kernel.trace(self.name, f"starts as incarnation {self.incarnation} of {self.plan.worker_id}")
        self.spawn(self._main())

    async def _main(self) -> None:
        """As worker_service/server.py does, without a gRPC server."""
        stub = cache_pb2_grpc.CacheServiceStub(self.world.manager_channel(self))
        tasks = [asyncio.create_task(self.engine.run()), asyncio.create_task(self.link.talk_to(stub))]
        drain = asyncio.create_task(self.engine.drain_asked.wait())
        done, _ = await asyncio.wait({*tasks, drain}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done and not self._is_refusal(task):
                self.world.fail("no surprises", f"{self.name}: engine or link has ended: {task.exception()!r}")
                return
        self.is_leaving = True
        engine = self.engine
        grace = GRACE_SECONDS if engine.drain_grace_seconds is None else engine.drain_grace_seconds
        engine.begin_drain()
        self.link.send_heartbeat()
        if not any(task.done() for task in tasks):
            ends = asyncio.create_task(engine.wait_until_empty())
            await asyncio.wait({ends, *tasks}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            ends.cancel()
        engine.fail_all(EngineError(ErrorKind.DRAINING, "this worker has left"))
        await asyncio.sleep(0.05)
        for _ in range(100):
            if self.cache.is_idle or not self.cache.is_ready():
                break
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.loop.call_soon(self._exit)

    def _is_refusal(self, task: asyncio.Task[Any]) -> bool:
        """Whether the manager knows another process of this worker, which lives: then this one has to end."""
        error = None if task.cancelled() else task.exception()
        self.was_refused = isinstance(error, RegistrationRefused)
        self.world.counts["workers that gave up"] += self.was_refused
        return self.was_refused

    def _exit(self) -> None:
        self.kernel.trace(self.name, "exits")
        self.world.laws.on_exit(self)
        self.crash()

    def on_death(self) -> None:
        self.count_preemptions()
        self.world.on_worker_death(self)

    def count_preemptions(self) -> None:
        self.world.counts["preemptions"] += self.engine.scheduler.num_preemptions
        self.engine.scheduler.num_preemptions = 0
        state = self.cache.state
        self.world.counts["windows named"] += state.num_windows_named
        self.world.counts["windows not named for lack of blocks"] += state.num_windows_not_named
        state.num_windows_named = state.num_windows_not_named = 0

    def after_turn(self) -> None:
        self.world.laws.after_worker_turn(self)

    def _execute(self, loop: Any, executor: Any, function: Any, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        if executor is self.gpu:
            step: Step = args[0]
            copies = (*step.copies, *self.forker.take_copies())
            launched: asyncio.Future[Any] = self.gpu.launch(step._replace(copies=copies))
            return launched
        return super()._execute(loop, executor, function, args)

    @property
    def is_quiet(self) -> bool:
        """Whether it is registered where it should be, and nothing is held here."""
        scheduler = self.engine.scheduler
        is_idle = self.cache.is_idle and not self.gpu.is_busy and not scheduler.num_running + scheduler.num_waiting
        return self.cache.is_ready() and is_idle

    def live_blocks(self) -> list[tuple[CacheSequence, list[list[tuple[int, int]]]]]:
        """Sequences whose blocks are used here, with these and their generations, by group."""
        return [
            (sequence, [_blocks(table) for table in sequence.group_tables])
            for sequence in self.cache.state.sequences.values()
            if sequence.uses_blocks and sequence.state in (SequenceState.LIVE, SequenceState.ENDING)
        ]


def _blocks(table: GroupTable) -> list[tuple[int, int]]:
    entries = [(entry.block, entry.generation) for entry in table.entries()]
    return [*entries, *((spare.block, spare.generation) for spare in table.scratch())]

"""A worker's process: model, engine, link and gRPC server, from start to stop."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

import structlog
from grpc_health.v1 import health_pb2
from tokenizers import Tokenizer

from kvpool.process.address import is_loopback
from kvpool.process.grpc_server import GrpcServer, Services
from kvpool.process.logs import identify_log_lines
from kvpool.process.metrics import MetricsServer, listen_for_metrics
from kvpool.process.signals import exit_status
from kvpool.process.version import installed_version
from kvpool.v1 import cache_pb2, worker_pb2, worker_pb2_grpc

from . import codec
from .attention.packing import StepSizes
from .cache.engine_cache import EngineCache
from .cache.groups.dense import DenseGroup
from .cache.groups.group import Group
from .cache.groups.state import StateGroup, grid_tokens
from .cache.groups.unit import UnitGroup
from .cache.groups.window import WindowGroup
from .cache.settings import CacheSettings
from .engine.engine import Engine
from .engine.errors import EngineError, ErrorKind
from .engine.settings import EngineSettings
from .incarnation import WorkerState
from .manager_link import ManagerLink
from .metrics import WorkerMetrics
from .model.device import choose_device, enter_device, lower_priority
from .model.errors import ModelError
from .model.forward.kv_plan import KVCachePlan
from .model.forward.runner import ModelRunner
from .model.load import LoadedModel, load_model
from .servicer import SERVICE, WorkerServicer, request_limits
from .settings import WorkerSettings
from .throughput import ThroughputLog

log = structlog.get_logger("kvpool.worker")

LAST_WORDS_SECONDS = 1.0
"""Time for readers of ended calls to get the last messages, and for transfers of a model's files."""

NOTICE_SECONDS = 0.1
"""Time between NOT_SERVING and the end, so that health watchers get it."""


class StoppedWhileLoading(Exception):
    """A signal arrived before the worker served. The loading thread cannot be stopped except by the end of the process."""

    def __init__(self, exit_status: int) -> None:
        super().__init__(exit_status)
        self.exit_status = exit_status


async def run_worker(settings: WorkerSettings) -> int:
    """Serve until SIGTERM, SIGINT or an order to drain; a second signal cuts the grace short. Returns the exit status. Raises
    PortError, WorkerStateError, ModelError, RegistrationRefused, StoppedWhileLoading."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    server: WorkerServer | None = None
    status = 0

    def on_signal(number: int) -> None:
        nonlocal status
        status = exit_status(number)
        if server is not None and (stop.is_set() or server.engine.is_draining):
            server.grace_cut.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loading = asyncio.create_task(WorkerServer.load(settings))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        log.info("stopped while the model was loading")
        raise StoppedWhileLoading(status)
    server = loading.result()
    _freeze_permanent_objects()
    async with server:
        await server.serve_until(stop)
    return status


def _freeze_permanent_objects() -> None:
    """Exclude the 400,000 objects of torch, transformers and the model from collections: they are never freed.

    grpc.aio leaves a few objects per call in a cycle with the request; without the permanent ones they are collected soon.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # of almost nothing: the next full collection depends on how much this one found


class WorkerServer:
    """A worker that listens. Created by `load`, started and stopped by `async with`, in the same event loop."""

    def __init__(
        self,
        settings: WorkerSettings,
        grpc_server: GrpcServer,
        state: WorkerState,
        loaded: LoadedModel,
        runner: ModelRunner,
        model_thread: ThreadPoolExecutor,
        metrics_listener: socket.socket | None = None,
    ) -> None:
        """`grpc_server` is bound and not started. `state` is closed at the end. `metrics_listener`: socket of /metrics."""
        self._settings = settings
        self._state = state
        self._grpc = grpc_server
        self.port = port = grpc_server.port
        self.worker_id = settings.name(port)
        self.runner = runner
        plan = runner.kv_cache.plan
        self.engine = _build_engine(settings, loaded, runner, model_thread)
        self.facts = facts = worker_pb2.ModelFacts(
            worker_id=self.worker_id,
            max_num_seqs=settings.max_num_seqs,
            block_size=settings.block_size,
            files=codec.encode_files(loaded.files),
            keeps_boundaries=bool(self.engine.cache.settings.keeping_boundaries),
        )
        facts.MergeFrom(loaded.facts)
        facts.facts_digest = codec.facts_digest(facts)
        self._servicer = WorkerServicer(
            self.engine,
            facts,
            loaded.files,
            reader_seconds=settings.reader_seconds,
            max_requests_of_stream=settings.max_concurrent_streams,
        )
        self._health_tasks: set[asyncio.Task[None]] = set()
        introduction = cache_pb2.RegisterRequest(
            worker_id=self.worker_id,
            incarnation=state.identity.incarnation,
            process_key=state.identity.process_key,
            predecessor_key=state.identity.predecessor_key,
            address=settings.advertised(port),
            model_name=facts.model_name,
            model_fingerprint=facts.model_fingerprint,
            kv_cache_config=self.engine.cache.settings.kv_cache_config([pool.bytes_per_block for pool in plan.pools()]),
            max_model_len=facts.max_model_len,
            facts_digest=facts.facts_digest,
            engine=f"kvpool {installed_version()}",
        )
        self._link = ManagerLink(settings.manager, introduction, self.engine, self._set_health)
        self._tasks: list[asyncio.Task[None]] = []
        self.grace_cut = asyncio.Event()
        """Set while the worker drains: the running streams end at once."""
        self.metrics: MetricsServer | None = None
        if metrics_listener is not None:
            metrics = WorkerMetrics(self.engine, self._link, facts, plan.total_bytes, lambda: grpc_server.num_rebuilds)
            self.metrics = MetricsServer(metrics_listener, metrics.fill, is_serving=self._grpc.is_answering)
        self._throughput: asyncio.Task[None] | None = None

    @classmethod
    async def load(cls, settings: WorkerSettings) -> Self:
        """Take the ports and the state folder, then load the model. Raises PortError, WorkerStateError, ModelError."""
        metrics_listener = None
        if settings.metrics_port is not None:
            metrics_listener = listen_for_metrics(settings.metrics_host, settings.metrics_port)
        server = GrpcServer(settings.host, settings.port, settings)
        server.bind()
        identify_log_lines(worker_id=settings.name(server.port))
        # The thread that loads runs the steps too: OpenMP keeps a team of threads for each thread that ever computed
        # something, and two teams on the same cores slow each other down (steps of 80 ms instead of 53 on two cores).
        model_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        state = None
        try:
            state = await asyncio.to_thread(
                WorkerState.open, settings.state_folder(server.port), is_required=settings.state_dir is not None
            )
            loaded, runner = await asyncio.get_running_loop().run_in_executor(model_thread, _load, settings)
        except BaseException:
            model_thread.shutdown(wait=False)
            if state is not None:
                state.close()
            if metrics_listener is not None:
                metrics_listener.close()
            raise
        return cls(settings, server, state, loaded, runner, model_thread, metrics_listener)

    @property
    def address(self) -> str:
        return self._grpc.address

    async def __aenter__(self) -> Self:
        self._set_health(False)
        await self._grpc.start(
            Services(
                names=(SERVICE,),
                add_to=lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, server),
                limits=request_limits(
                    self.engine.prompts.max_ids, self.facts.vocab_size, self.engine.prompts.text_bound
                ),
                on_refused=self._servicer.on_unread,
            )
        )
        log.info("listening", worker_id=self.worker_id, address=self.address, model=self.facts.model_name)
        if not is_loopback(self._settings.host):
            log.warning("listening beyond loopback without encryption or authentication", host=self._settings.host)
        self._tasks = [
            asyncio.create_task(self.engine.run(), name="engine"),
            asyncio.create_task(self._link.run(), name="link"),
        ]
        self._throughput = asyncio.create_task(ThroughputLog(self.engine).run(), name="throughput")
        if self.metrics is not None:
            await self.metrics.start()
        return self

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Wait for `stop` or a drain. Raises the error of the engine, the link or the gRPC server if one fails."""
        reasons = [asyncio.create_task(event.wait()) for event in (stop, self.engine.drain_asked)]
        parts = {*self._tasks, asyncio.create_task(self._grpc.run(), name="grpc-server-run")}
        done, _ = await asyncio.wait({*parts, *reasons}, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (*reasons, *(parts - set(self._tasks))):
            waiting.cancel()
        for task in done & parts:
            task.result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Refuse new requests, let the running ones end within the grace, free everything, and deregister."""
        self._set_health(False)
        await self._drain()
        # Bounded: a reader may never take its last status.
        await self._grpc.stop(LAST_WORDS_SECONDS)
        # The streams have ended; the link must send Free before Deregister.
        await _settle(self.engine)
        assert self._throughput is not None
        tasks = [*self._tasks, self._throughput]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._health_tasks, return_exceptions=True)
        if self.metrics is not None:
            await self.metrics.stop()
        self._state.close()
        engine = self.engine
        log.info(
            "stopped",
            steps=engine.stats.num_steps,
            forwarded_tokens=engine.stats.num_forwarded_tokens,
            preemptions=engine.scheduler.num_preemptions,
            calls_to_manager=engine.cache.num_calls,
            decodes_that_waited_for_a_call=engine.cache.num_reserve_waits,
            has_left_the_manager=self._link.has_left,
        )

    async def _drain(self) -> None:
        """Wait until no request is left; after the grace, end the rest."""
        engine = self.engine
        grace_seconds = self._settings.grace_seconds
        if engine.drain_grace_seconds is not None:
            grace_seconds = engine.drain_grace_seconds
        log.info("draining", grace_seconds=grace_seconds, num_running=engine.scheduler.num_running)
        engine.begin_drain()
        self._link.send_heartbeat()
        await asyncio.sleep(NOTICE_SECONDS)
        if not any(task.done() for task in self._tasks):
            ends = [asyncio.create_task(wait) for wait in (engine.wait_until_empty(), self.grace_cut.wait())]
            await asyncio.wait({*ends, *self._tasks}, timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        num_left = engine.scheduler.num_running + engine.scheduler.num_waiting
        if num_left:
            log.warning("streams ended unfinished", num_requests=num_left, grace_seconds=grace_seconds)
            why = f"this worker has left: running requests had {grace_seconds:g} s to end"
            engine.fail_all(EngineError(ErrorKind.DRAINING, why))

    def _set_health(self, serving: bool) -> None:
        """Set the health status. `serving`: the session works; a draining worker is NOT_SERVING all the same."""
        serving = serving and not self.engine.is_draining
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            task = asyncio.ensure_future(self._grpc.health.set(service, state))
            self._health_tasks.add(task)
            task.add_done_callback(self._health_tasks.discard)


async def _settle(engine: Engine, seconds: float = 1.0) -> None:
    """Wait until the manager has acknowledged that everything is freed, at most `seconds`."""
    for _ in range(round(seconds / 0.01)):
        if engine.cache.is_idle or not engine.cache.is_ready():
            break
        await asyncio.sleep(0.01)


def _load(settings: WorkerSettings) -> tuple[LoadedModel, ModelRunner]:
    """Load the model and make its runner. Runs in the thread that will run the steps."""
    device = choose_device(settings.device)
    enter_device(device)
    if device.type == "cpu":
        lower_priority(settings.model_nice)
    loaded = load_model(settings.model_settings(), progress=log.info)
    check_default_beams(loaded.facts, settings.max_num_seqs)
    backend = loaded.attention_backend(settings.attention_backend, settings.block_size, log.info)
    loaded = loaded.try_batch_invariance(backend)
    log_batch_invariance(loaded.facts)
    budget = loaded.plan(settings.memory_settings(), backend)
    for line in budget.lines():
        log.info(str(line))
    plan = budget.kv_cache
    log.info(plan.describe(loaded.facts.max_model_len))
    capacities = [group.capacity for group in plan.groups if group.window is None]
    blocks_per_sequence = min([*capacities, -(-loaded.facts.max_model_len // plan.block_size)])
    sizes = StepSizes(settings.max_num_seqs, settings.max_num_batched_tokens, blocks_per_sequence)
    return loaded, loaded.runner(plan, backend, sizes)


def check_default_beams(facts: worker_pb2.ModelFacts, max_num_seqs: int) -> None:
    """ModelError if a request that says nothing could never be served."""
    num_beams = facts.defaults.beam_search.num_beams
    if num_beams > max_num_seqs:
        raise ModelError(
            f"generation_config.json: num_beams {num_beams} is what requests ask for by default, and this worker's batch has "
            f"{max_num_seqs} sequences: give it a larger --max-num-seqs, or take the field out of the file."
        )


def log_batch_invariance(facts: worker_pb2.ModelFacts) -> None:
    found = facts.batch_invariance
    # It should hold in float32 on every CPU; for others it is not promised, and its lack is no fault.
    is_missing = not found.promised and facts.dtype == "float32" and facts.device == "cpu"
    write_log = log.warning if is_missing else log.info
    write_log(f"batch invariance: {'promised' if found.promised else 'not promised'}: {found.reason}")


_OF_ENGINE: Final = {
    *("max_num_seqs", "max_num_batched_tokens", "max_mixed_prefill_tokens", "scheduling_policy"),
    *("max_num_waiting", "max_num_waiting_tokens", "prefix_caching"),
}
"""Settings that are the engine's."""


def _build_engine(
    settings: WorkerSettings, loaded: LoadedModel, runner: ModelRunner, model_thread: ThreadPoolExecutor
) -> Engine:
    facts, plan = loaded.facts, runner.kv_cache.plan
    cache_settings = CacheSettings(
        block_size=plan.block_size,
        groups=_groups(plan),
        max_chunk_tokens=plan.chunk_tokens or settings.max_num_batched_tokens,
        retention_interval=settings.retention_interval,
        report_seconds=settings.report_seconds,
        reserve_seconds=settings.reserve_seconds,
    )
    engine_settings = EngineSettings(
        model_fingerprint=facts.model_fingerprint,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        eos_token_ids=frozenset(facts.eos_token_ids),
        **settings.model_dump(include=_OF_ENGINE),
        encoder=loaded.encoder,
    )
    tokenizer_json = loaded.files.get(worker_pb2.MODEL_FILE_TOKENIZER)
    tokenizer = None if tokenizer_json is None else Tokenizer.from_str(tokenizer_json.decode())
    return Engine(engine_settings, EngineCache(cache_settings), runner, tokenizer, model_thread)


def _groups(plan: KVCachePlan) -> tuple[Group, ...]:
    """The groups of a plan, each of its kind, in its order."""
    groups: list[Group] = [
        DenseGroup(group.num_blocks) if group.window is None else WindowGroup(group.num_blocks, group.window)
        for group in plan.groups
    ]
    if plan.states is not None:
        groups.append(StateGroup(plan.states.num_blocks, grid_tokens(plan.block_size)))
    if plan.cross is not None:
        groups.append(UnitGroup(plan.cross.num_blocks, plan.cross.max_tokens))
    return tuple(groups)

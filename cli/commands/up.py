"""`kvpool up`: runs a cluster on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final

import typer
from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic_settings import SettingsConfigDict
from rich.console import Console

from kvpool.client.block_map import sequence_blocks
from kvpool.client.config import MANAGER_VARIABLE, ClientConfig
from kvpool.client.errors import InvalidRequest, KvpoolError
from kvpool.process.address import DEFAULT_MANAGER, DEFAULT_PORT
from kvpool.process.logs import LogFormat
from kvpool.process.settings import CONFIG_VARIABLE, ProcessSettings, read_tables
from kvpool.process.signals import INTERRUPTED
from kvpool.v1 import cache_pb2

from ..launch.children import Children
from ..launch.cluster import GATEWAY_NAME, HOST, MANAGER_NAME, Cluster, ClusterSpec
from ..launch.gpus import visible_gpus
from ..launch.log import JsonLog, Level, Log, PrefixedLog
from ..launch.trial import WorkerRefused
from ..launch.worker_flags import WorkerFlags
from ..settings import GatewayPort
from ..terminal import error_line, printed, stdout_console, typed_command

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_SECONDS: Final = 3660.0
"""Grace of the processes, longer than the longest grace of a worker. A second Ctrl-C ends it."""
_DEVICE_VARIABLE: Final = "KVPOOL_WORKER_DEVICE"
_REFUSED: Final = {
    "--manager": "give --join",
    "--worker-id": "give --name",
    "--dry-run": "`kvpool worker --dry-run` prints the plan",
}
"""Flags of a worker that `kvpool up` sets itself, and what to do instead."""


class UpSettings(ProcessSettings):
    """A manager and its workers on this machine; Ctrl-C stops them all, one that dies is started again.

    Flags that are not listed here go to each worker, e.g. --model, --num-blocks or --scheduling-policy: `kvpool worker --help`
    lists them. --port after -- is the workers' too.

    Each setting listed here is also a variable, e.g. KVPOOL_UP_WORKERS=2, and a line below [up] of the file that --config names,
    e.g. workers = 2. The manager and the workers read their own variables (KVPOOL_MANAGER_LEASE_SECONDS=6,
    KVPOOL_WORKER_NUM_BLOCKS=64) and tables, [manager] and [worker], of the same file.
    """

    model_config = SettingsConfigDict(env_prefix="KVPOOL_UP_", cli_prog_name="kvpool up")
    table: ClassVar[str] = "up"

    workers: int = Field(default=1, ge=1, le=64, description="Workers to start.")
    device: str | None = Field(
        default=None,
        description="cpu; cuda: each worker has a GPU of its own; cuda:N: all share one. Default: cuda if this machine has GPUs, "
        "else cpu.",
    )
    host: Annotated[str, StringConstraints(min_length=1)] = Field(
        default=HOST,
        description="Address to listen on, manager and workers. There is neither encryption nor authentication: anything but "
        "loopback needs a network you trust.",
    )
    port: int = Field(default=DEFAULT_PORT, ge=1, le=65535, description="TCP port of the manager.")
    join: str | None = Field(
        default=None,
        description="host:port of a manager on another machine: start workers only, for it. Default: start a manager.",
    )
    name: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = Field(
        default=None,
        description="The workers are called NAME-0, NAME-1, …; names are unique in a cluster. Default: worker, with --join the "
        "host name.",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="TCP port of the manager's /metrics; the workers take the next ones, with --join this one and the next. "
        "Default: no metrics.",
    )
    metrics_host: Annotated[str, StringConstraints(min_length=1)] = Field(
        default=HOST, description="Address for /metrics; --host does not change it."
    )
    http: GatewayPort | None = Field(
        default=None,
        description="TCP port, on 127.0.0.1, of a gateway: OpenAI's API, and a page that shows the cache live. Its other settings "
        "are variables (KVPOOL_GATEWAY_API_KEY) and in [gateway] of the file. Default: no gateway.",
    )
    state_dir: Path | None = Field(
        default=None,
        description="Folder where the manager keeps its epoch and, in workers/NAME, each worker its incarnation. Default: the "
        "default folder of each process.",
    )
    log_format: LogFormat | None = Field(
        default=None,
        description="Format of the log lines of all processes. json: each line of the output is a JSON object, those of kvpool up "
        "itself too. Default: console, and for the manager and the workers their own setting.",
    )

    @field_validator("join")
    @classmethod
    def _join_is_an_address(cls, join: str | None) -> str | None:
        if join is not None:
            try:
                ClientConfig(manager=join)
            except InvalidRequest as error:
                raise ValueError(str(error)) from None
        return join

    @model_validator(mode="after")
    def _state_is_of_a_manager(self) -> UpSettings:
        if self.join is not None and self.state_dir is not None:
            raise ValueError("--state-dir is of the manager that --join leaves out: give one of them")
        return self

    @model_validator(mode="after")
    def _metrics_have_ports(self) -> UpSettings:
        if self.metrics_port is not None:
            num_ports = self.workers + (self.join is None)
            last = self.metrics_port + num_ports - 1
            if last > 65535:
                raise ValueError(
                    f"--metrics-port {self.metrics_port}: {num_ports} processes need as many ports, and the largest is 65535"
                )
            if self.join is None and self.metrics_port <= self.port <= last:
                raise ValueError(
                    f"--metrics-port {self.metrics_port}: {num_ports} processes take the ports up to {last}, among them the "
                    f"manager's own, {self.port}; choose another one"
                )
        return self

    def spec(self, worker_arguments: Sequence[str] = ()) -> ClusterSpec:
        """Return the processes to start, each worker with these arguments. Raises SettingsProblem if the settings file cannot be
        read."""
        gpu_each = self.device == "cuda" or (self.device is None and self._finds_gpus())
        device = "cuda:0" if gpu_each else self.device
        names = {"host", "port", "join", "state_dir", "log_format", "metrics_host", "metrics_port"}
        return ClusterSpec(
            **self.model_dump(include=names),
            num_workers=self.workers,
            name=self.name or (socket.gethostname() if self.join else "worker"),
            worker_arguments=(*(() if device is None else ("--device", device)), *worker_arguments),
            http_port=self.http,
            gpu_each=gpu_each,
            share_cores=not (device or "").startswith("cuda"),
        )

    def _finds_gpus(self) -> bool:
        """Whether all workers would take the first of this machine's GPUs by default."""
        if os.environ.get(_DEVICE_VARIABLE) not in (None, "", "auto"):
            return False
        path = os.environ.get(CONFIG_VARIABLE)
        if path and read_tables(Path(path).expanduser()).get("worker", {}).get("device", "auto") != "auto":
            return False
        return bool(visible_gpus(os.environ))


FLAGS: Final = WorkerFlags("kvpool up", UpSettings, _REFUSED)


def up(context: typer.Context) -> None:
    """Start a manager and its workers; Ctrl-C stops them all. `kvpool up --help` lists the settings."""
    settings, worker_arguments = FLAGS.load(context.args)
    if settings.config is not None:
        os.environ[CONFIG_VARIABLE] = str(settings.config.expanduser().resolve())  # the children read it too
    spec = settings.spec(worker_arguments)
    if settings.log_format is LogFormat.json:
        log: Log = JsonLog(sys.stdout, MANAGER_NAME)
        status = asyncio.run(run_cluster(spec, log, Console(quiet=True)))
    else:
        console = stdout_console()
        status = asyncio.run(run_cluster(spec, PrefixedLog(console), console))
    sys.exit(status)


async def run_cluster(spec: ClusterSpec, log: Log, console: Console) -> int:
    """Run a cluster until a signal, or until it ends by itself. Returns the exit status: 130 after SIGINT, 0 after another signal
    or when every worker has left, the worker's own if it refuses its settings, else 1. `console` shows progress."""
    loop = asyncio.get_running_loop()
    stop_asked: asyncio.Future[int] = loop.create_future()
    async with Children(log, grace_seconds=_STOP_SECONDS, last=MANAGER_NAME) as children:
        running = asyncio.create_task(_serve(spec, children, log, console))

        def on_signal(number: int) -> None:
            if stop_asked.done():
                children.kill_now()
            else:
                stop_asked.set_result(number)

        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        await asyncio.wait({running, stop_asked}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            status = running.result()
        else:
            status = INTERRUPTED if stop_asked.result() == signal.SIGINT else 0
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        with console.status("stopping; Ctrl-C again ends everything at once"):
            await children.stop()
        return status


async def _serve(spec: ClusterSpec, children: Children, log: Log, console: Console) -> int:
    """Start everything, say how to use it, and restart processes that die. Returns the exit status when the last worker has left,
    or after a failure."""

    def on_event(line: str) -> None:
        log.say(line, Level.event)

    cluster = Cluster(spec, children)
    try:
        with console.status("starting") as progress:
            workers = await cluster.start(lambda line: progress.update(printed(line)), on_event)
        say_ready(workers, spec, children.pids(), log)
        await cluster.keep_alive(on_event)
    except WorkerRefused as refused:
        for line in await asyncio.to_thread(FLAGS.say_refusal, refused, spec.worker_arguments):
            log.say(line, Level.error)
        return refused.exit_status
    except KvpoolError as error:
        log.say(error_line(error), Level.error)
        return 1
    log.say("every worker has left", Level.event)
    return 0


def say_ready(
    workers: Sequence[cache_pb2.WorkerDescription], spec: ClusterSpec, pids: Mapping[str, int], log: Log
) -> None:
    """Log the address of each process, and what to type next."""
    if MANAGER_NAME in pids:
        log.say(
            f"{MANAGER_NAME} (pid {pids[MANAGER_NAME]}) serves on {spec.address}", fields={"pid": pids[MANAGER_NAME]}
        )
    for worker in workers:
        block_size = worker.kv_cache_config.block_size
        capacity = sequence_blocks(worker)
        pid = pids.get(worker.worker_id)
        log.say(
            f"{worker.worker_id} (pid {pid}) serves {worker.model_name} on {worker.address}: "
            f"{capacity:,} blocks of {block_size} tokens, {capacity * block_size:,} tokens in all, at most "
            f"{worker.max_model_len:,} in a text",
            fields={"worker_id": worker.worker_id, "pid": pid},
        )
    for name, url in spec.metrics_urls.items():
        log.say(f"metrics of {name}: {url}")
    if spec.http_port is not None:
        pid = pids.get(GATEWAY_NAME)
        log.say(
            f"{GATEWAY_NAME} (pid {pid}) serves OpenAI's API on {spec.http_url}/v1, and a page on {spec.http_url}",
            fields={"pid": pid, "url": spec.http_url},
        )
    command = typed_command()
    if spec.address != DEFAULT_MANAGER:
        command = f"{MANAGER_VARIABLE}={spec.address} {command}"
    log.say(
        f'ready: in another terminal, `{command} chat`, `{command} generate "Once upon a time"` or `{command} top`; '
        "Ctrl-C here stops everything",
        Level.event,
        {"manager": spec.address},
    )

"""`kvpool up`: a cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final

import typer
from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic_settings import SettingsConfigDict
from rich.console import Console

from kvpool.process.address import DEFAULT_MANAGER, DEFAULT_PORT, EVERY_ADDRESS
from kvpool.process.settings import CONFIG_VARIABLE, ProcessSettings, SettingsProblem, load_settings, read_tables
from kvpool.v1 import cache_pb2

from ...block_map import num_device_blocks
from ...config import MANAGER_VARIABLE, ClientConfig
from ...errors import InvalidRequest, KvpoolError
from ..launch.children import Supervisor
from ..launch.cluster import HOST, MANAGER_NAME, Cluster, ClusterSpec
from ..launch.gpus import visible_gpus
from ..launch.log import PrefixedLog
from ..terminal import error_line, printed, stdout_console

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_SECONDS: Final = 3660.0
"""More than the longest grace that a worker can be given; whoever does not want to wait presses Ctrl-C once more."""
_DEVICE_VARIABLE: Final = "KVPOOL_WORKER_DEVICE"
_END_OF_OWN: Final = "--"
_SETTLED_ELSEWHERE: Final = {"manager": "join", "worker_id": "name", "port": None}
"""Settings of a worker that have another name here; `port` is the manager's here, the worker's may be given."""


class UpSettings(ProcessSettings):
    """A manager and its workers on this machine; Ctrl-C stops them all, one that dies is started again.

    Each setting is also a variable, e.g. KVPOOL_UP_WORKERS=2, and a line below [up] of the file that --config names, e.g.
    workers = 2. What stands behind -- goes to each worker as it is, e.g. kvpool up --workers 2 -- --scheduling-policy priority;
    kvpool worker --help lists what there is. Further settings of the processes are also taken from their own variables
    (KVPOOL_MANAGER_LOG_FORMAT=json, KVPOOL_WORKER_MAX_NUM_BATCHED_TOKENS=1024) and from [manager] and [worker] of the same file.
    """

    model_config = SettingsConfigDict(env_prefix="KVPOOL_UP_", cli_prog_name="kvpool up")
    table: ClassVar[str] = "up"

    workers: int = Field(default=1, ge=1, le=64, description="Workers to start.")
    model: str | None = Field(
        default=None,
        description="A model folder, smollm2, or a model's name on the hub. Default: the worker's, smollm2.",
    )
    device: str | None = Field(
        default=None,
        description="cpu; cuda: each worker has a GPU of its own; cuda:N: all share one. Default: cuda if this machine shows "
        "GPUs, else cpu.",
    )
    dtype: str | None = Field(
        default=None, description="auto, float32, bfloat16 or float16. Default: the worker's, auto."
    )
    host: Annotated[str, StringConstraints(min_length=1)] = Field(
        default=HOST,
        description="Address to listen on, manager and workers. There is neither encryption nor authentication: anything but "
        "loopback needs a network you trust.",
    )
    port: int = Field(default=DEFAULT_PORT, ge=1, le=65535, description="TCP port of the manager.")
    advertise: str | None = Field(
        default=None,
        description="Host under which clients reach the workers. Default: the address they listen on.",
    )
    join: str | None = Field(
        default=None,
        description="host:port of a manager on another machine: start workers only, for it. Default: start a manager.",
    )
    name: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = Field(
        default=None,
        description="The workers are called NAME-0, NAME-1, …; names are unique in a cluster. Default: worker, with --join the "
        "host name.",
    )
    num_blocks: int | None = Field(default=None, description="KV blocks of each worker. Default: the worker's.")
    kv_cache_memory: str | None = Field(
        default=None, description="Size of each worker's KV cache, e.g. 2GiB. Default: the worker's."
    )
    block_size: int | None = Field(default=None, description="Token slots of a block. Default: the worker's, 16.")
    max_model_len: int | None = Field(
        default=None, description="Prompt and answer together, in tokens. Default: the model's own."
    )
    max_num_seqs: int | None = Field(
        default=None, description="Sequences in one batch of a worker. Default: the worker's, 64."
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
    state_dir: Path | None = Field(
        default=None,
        description="Folder where the manager keeps its epoch and, in workers/NAME, each worker its incarnation. Default: of each "
        "its own.",
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
    def _workers_can_be_reached(self) -> UpSettings:
        if self.host in EVERY_ADDRESS and self.advertise is None:
            raise ValueError(
                f"listening on {self.host} needs --advertise: the host under which clients reach the workers"
            )
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

    def spec(self, further_worker_arguments: Sequence[str] = ()) -> ClusterSpec:
        """What is to be started. Raises SettingsProblem if the settings file of the workers cannot be read, or if their further
        arguments name what is settled here."""
        _require_further(further_worker_arguments)
        gpu_each = self.device == "cuda" or (self.device is None and self._finds_gpus())
        arguments: list[str] = []
        for flag, value in (
            ("--model", self.model),
            ("--device", "cuda:0" if gpu_each else self.device),
            ("--dtype", self.dtype),
            ("--advertise", self.advertise),
            ("--num-blocks", self.num_blocks),
            ("--kv-cache-memory", self.kv_cache_memory),
            ("--block-size", self.block_size),
            ("--max-model-len", self.max_model_len),
            ("--max-num-seqs", self.max_num_seqs),
        ):
            if value is not None:
                arguments += [flag, str(value)]
        return ClusterSpec(
            num_workers=self.workers,
            name=self.name or (socket.gethostname() if self.join else "worker"),
            host=self.host,
            port=self.port,
            join=self.join,
            state_dir=self.state_dir,
            worker_arguments=(*arguments, *further_worker_arguments),
            metrics_host=self.metrics_host,
            metrics_port=self.metrics_port,
            gpu_each=gpu_each,
            share_cores=not gpu_each and not (self.device or "").startswith("cuda"),
        )

    def _finds_gpus(self) -> bool:
        """Whether the workers, left to themselves, would take GPUs: all of them the same one."""
        if os.environ.get(_DEVICE_VARIABLE) not in (None, "", "auto"):
            return False
        path = os.environ.get(CONFIG_VARIABLE)
        if path and read_tables(Path(path).expanduser()).get("worker", {}).get("device", "auto") != "auto":
            return False
        return bool(visible_gpus(os.environ))


def up(context: typer.Context) -> None:
    """Start a manager and its workers; Ctrl-C stops them all. `kvpool up --help` lists the settings."""
    end = context.args.index(_END_OF_OWN) if _END_OF_OWN in context.args else len(context.args)
    settings = _own_settings(context.args[:end])
    if settings.config is not None:
        os.environ[CONFIG_VARIABLE] = str(settings.config.expanduser().resolve())  # the children read it too
    spec = settings.spec(context.args[end + 1 :])
    _have_workers_look(spec)
    sys.exit(asyncio.run(run_cluster(spec, stdout_console())))


def _own_settings(arguments: Sequence[str]) -> UpSettings:
    try:
        return load_settings(UpSettings, arguments)
    except SystemExit as exit_:
        strange = [flag for flag in _flags(arguments) if _field(flag) not in UpSettings.model_fields]
        if exit_.code and strange:
            print(
                f"kvpool up: if {strange[0]} is a setting of the workers, give it behind --: kvpool up … -- {strange[0]} …",
                file=sys.stderr,
            )
        raise


def _require_further(arguments: Sequence[str]) -> None:
    """SettingsProblem if a worker is to be told what `kvpool up` tells it: the two would not agree about the cluster."""
    for flag in _flags(arguments):
        field = _field(flag)
        if field == "dry_run":
            raise SettingsProblem("--dry-run starts no worker: `kvpool worker --dry-run` prints the plan")
        if instead := _SETTLED_ELSEWHERE.get(field, field if field in UpSettings.model_fields else None):
            own = "--" + instead.replace("_", "-")
            raise SettingsProblem(f"{flag} behind --: `kvpool up` settles it for its workers; give {own} before the --")


def _flags(arguments: Sequence[str]) -> list[str]:
    return [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _have_workers_look(spec: ClusterSpec) -> None:
    """Before anything is started, a worker says what is wrong with its arguments, variables and table of the file; the exit
    status is then its own. An exit also where it was asked for its --help."""
    looked = subprocess.run(spec.worker_settings_command(), stdout=subprocess.PIPE, text=True, check=False)
    if looked.returncode or looked.stdout:
        print(looked.stdout, end="")
        sys.exit(looked.returncode)


async def run_cluster(spec: ClusterSpec, console: Console) -> int:
    """Run a cluster until a signal, or until it ends by itself; returns the exit status: 1 after a failure, else 0."""
    log = PrefixedLog(console)
    loop = asyncio.get_running_loop()
    stop_asked = asyncio.Event()
    async with Supervisor(log, grace_seconds=_STOP_SECONDS, last=MANAGER_NAME) as supervisor:
        cluster = Cluster(spec, supervisor)
        running = asyncio.create_task(_serve(cluster, spec, console))

        def on_signal() -> None:
            if stop_asked.is_set():
                supervisor.kill_now()
            stop_asked.set()

        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, on_signal)
        asked = asyncio.create_task(stop_asked.wait())
        await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        exit_status = 0
        if running.done():
            if (error := running.result()) is not None:
                print(error_line(error), file=sys.stderr)
                exit_status = 1
        else:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        with console.status("stopping; once more Ctrl-C ends everything at once"):
            await supervisor.stop()
        return exit_status


async def _serve(cluster: Cluster, spec: ClusterSpec, console: Console) -> KvpoolError | None:
    """Start, say how to use it, and keep it going; the result is what went wrong, None when the last worker has left."""

    def tell(line: str) -> None:
        console.print(printed(line), style="bold", soft_wrap=True)

    try:
        with console.status("starting") as progress:
            workers = await cluster.start(lambda line: progress.update(printed(line)), tell)
        _print_ready(workers, spec, console)
        await cluster.keep_alive(tell)
    except KvpoolError as error:
        return error
    console.print("every worker has left", style="bold")
    return None


def _print_ready(workers: list[cache_pb2.WorkerDescription], spec: ClusterSpec, console: Console) -> None:
    for worker in workers:
        block_size = worker.kv_cache_config.block_size
        capacity = num_device_blocks(worker) - 1
        console.print(
            printed(
                f"{worker.worker_id} serves {worker.model_name} on {worker.address}: "
                f"{capacity:,} blocks of {block_size} tokens, {capacity * block_size:,} tokens in all"
            )
        )
    for name, url in spec.metrics_urls.items():
        console.print(f"metrics of {name}: {url}", markup=False)
    prefix = "" if spec.address == DEFAULT_MANAGER else f"{MANAGER_VARIABLE}={spec.address} "
    console.print(
        f'ready: in another terminal, `{prefix}kvpool chat`, `{prefix}kvpool generate "Once upon a time"` '
        f"or `{prefix}kvpool top`; Ctrl-C here stops everything",
        style="bold",
        markup=False,
        soft_wrap=True,
    )

"""`kvpool up`: a cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Annotated, Final

import typer
from kvpool.v1 import cache_pb2
from rich.console import Console

from ..config import DEFAULT_MANAGER, MANAGER_VARIABLE
from ..errors import KvpoolError
from .cluster import Cluster, ClusterSpec
from .log import PrefixedLog
from .status import num_device_blocks
from .supervisor import Supervisor
from .terminal import error_line, stdout_console

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def up(
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Workers to start.")] = 1,
    model: Annotated[str, typer.Option("--model", help="A transformers model folder, or smollm2.")] = "smollm2",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda:N.")] = "auto",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the manager.")] = 50051,
    num_blocks: Annotated[int | None, typer.Option("--num-blocks", help="KV blocks of each worker.")] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option("--kv-cache-memory", help="Bytes of KV of each worker.")
    ] = None,
    block_size: Annotated[int | None, typer.Option("--block-size", help="Token slots of a block.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Prompt and answer together, in tokens.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option("--max-num-seqs", help="Sequences in one batch.")] = None,
    state_dir: Annotated[str | None, typer.Option("--state-dir", help="Where the manager keeps its epoch.")] = None,
) -> None:
    """Start a manager and its workers; Ctrl-C stops them all."""
    arguments = ["--model", model, "--dtype", dtype, "--device", device]
    for name, value in (
        ("--num-blocks", num_blocks),
        ("--kv-cache-memory", kv_cache_memory),
        ("--block-size", block_size),
        ("--max-model-len", max_model_len),
        ("--max-num-seqs", max_num_seqs),
    ):
        if value is not None:
            arguments += [name, str(value)]
    spec = ClusterSpec(
        num_workers=workers,
        port=port,
        manager_arguments=() if state_dir is None else ("--state-dir", state_dir),
        worker_arguments=tuple(arguments),
        share_cores=not device.startswith("cuda"),
    )
    sys.exit(asyncio.run(run_cluster(spec, stdout_console())))


async def run_cluster(spec: ClusterSpec, console: Console) -> int:
    """Run a cluster until a signal or a death; returns the exit status: 0 after a signal, 1 after a failure."""
    log = PrefixedLog(console)
    loop = asyncio.get_running_loop()
    stop_asked = asyncio.Event()
    async with Supervisor(log) as supervisor:
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
        if running.done():
            print(error_line(running.result()), file=sys.stderr)
            exit_status = 1
        else:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            exit_status = 0
        with console.status("stopping; once more Ctrl-C ends everything at once"):
            await supervisor.stop()
        return exit_status


async def _serve(cluster: Cluster, spec: ClusterSpec, console: Console) -> KvpoolError:
    """Start, say how to use it, and wait for a failure, which is the result."""
    with console.status("starting") as progress:
        try:
            workers = await cluster.start(lambda line: progress.update(line))
        except KvpoolError as error:
            return error
    _print_ready(workers, spec, console)
    return await cluster.wait_for_failure()


def _print_ready(workers: list[cache_pb2.WorkerDescription], spec: ClusterSpec, console: Console) -> None:
    for worker in workers:
        block_size = worker.kv_cache_config.block_size
        capacity = num_device_blocks(worker) - 1
        console.print(
            f"{worker.worker_id} serves {worker.model_name} on {worker.address}: "
            f"{capacity:,} blocks of {block_size} tokens, {capacity * block_size:,} tokens in all",
            markup=False,
        )
    prefix = "" if spec.address == DEFAULT_MANAGER else f"{MANAGER_VARIABLE}={spec.address} "
    console.print(
        f'ready: in another terminal, `{prefix}kvpool chat`, `{prefix}kvpool generate "Once upon a time"` '
        f"or `{prefix}kvpool blocks`; Ctrl-C here stops everything",
        style="bold",
        markup=False,
        soft_wrap=True,
    )

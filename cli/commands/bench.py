"""`kvpool bench`: puts load on a running cluster, and measures it."""

from __future__ import annotations

import asyncio
import secrets
import sys
from dataclasses import replace
from typing import Annotated, Final

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvpool.client.errors import InvalidRequest, KvpoolError
from kvpool.load import report
from kvpool.load.arrivals import DEFAULT_MAX_IN_FLIGHT, MAX_IN_FLIGHT, Arrivals, ClosedLoop, OpenLoop, Pattern
from kvpool.load.kvpool_engine import KvpoolEngine
from kvpool.load.load import DEFAULT_STALL_SECONDS, LoadObserver
from kvpool.load.plan import MAX_REPETITIONS, CacheCase, LoadPlan, Measured, default_sizes, measure
from kvpool.load.sample import RequestSample
from kvpool.load.workload import DEFAULT_CONVERSATIONS, LoadWorkload
from kvpool.process.signals import INTERRUPTED

from ..answer_flags import ModelName, Priority, Tenant
from ..terminal import (
    JsonOption,
    ManagerOption,
    client_config,
    error_line,
    print_json,
    printed,
    stderr_console,
    stdout_console,
)

_MAX_DEFAULT_USERS: Final = 16

bench = typer.Typer(
    help="Load on a running cluster, and figures of it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@bench.callback()
def _bench() -> None:
    """Load on a running cluster, and figures of it."""


@bench.command("serve")
def serve(
    workload: Annotated[
        LoadWorkload,
        typer.Option(
            help="shared: requests with one prefix. unshared: nothing in common. document: questions about one long document. "
            "chats: conversations of several turns, each with all that was before. mixed: log-normal lengths, some sharing."
        ),
    ] = LoadWorkload.SHARED,
    users: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_IN_FLIGHT,
            help="Closed loop: users, each asking again when its answer is complete. Default: one per request, at most 16.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Open loop in place of users: requests (chats: conversations) a second, also while answers are late."
        ),
    ] = None,
    arrivals: Annotated[
        Pattern | None,
        typer.Option(help="Distances between requests of the open loop.", show_default="poisson"),
    ] = None,
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_IN_FLIGHT,
            show_default="256",
            help="Open loop: requests at the same time. The next ones wait for a place, and their waiting counts.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests (chats: conversations) of one repetition. Default: 16, document and chats 8, mixed 64.",
        ),
    ] = None,
    prefix_tokens: Annotated[
        int | None,
        typer.Option(
            min=0, help="What requests have in common. Default: shared 512, document 4096, mixed 128, else 0."
        ),
    ] = None,
    own_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="What each prompt or turn adds; mixed: mean of whole prompts. Default: 32, unshared 544, chats 100, mixed 300.",
        ),
    ] = None,
    generated_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of each answer; mixed: its mean. Default: 32, chats 50, mixed 100."),
    ] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="chats: turns of each. Default: 6.")] = None,
    repetitions: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_REPETITIONS, help="Runs, each with tokens of its own: what came before is no help."
        ),
    ] = 1,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm", help="Send each repetition a second time too, when the cache holds it, and report both."
        ),
    ] = False,
    warm_up: Annotated[
        bool, typer.Option("--warm-up/--no-warm-up", help="Begin with a run of the same size that is not counted.")
    ] = True,
    waste: Annotated[
        bool | None,
        typer.Option(
            "--waste/--no-waste",
            show_default="only in mixed",
            help="Look at the block map four times a second, and report how many held slots have no token.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same tokens and arrivals; the cache may still hold those of the last time. Default: a new one."
        ),
    ] = None,
    stall_seconds: Annotated[
        float, typer.Option(min=0.1, help="Give up when nothing has come for so long.")
    ] = DEFAULT_STALL_SECONDS,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds for one request, until its last token.", show_default="600"),
    ] = None,
    priority: Priority = 0,
    tenant: Tenant = "",
    model: ModelName = None,
    as_json: JsonOption = False,
    manager: ManagerOption = None,
) -> None:
    """Send a workload to a running cluster; report latencies, tokens per second and the hit rate.

    Prompts are random tokens of the served model, answers greedy and of fixed length. Exit status 1 if a request failed or
    was refused; the figures are of those that were complete.
    """
    num_conversations = requests or DEFAULT_CONVERSATIONS[workload]
    seed = secrets.randbits(32) if seed is None else seed
    sizes = default_sizes(
        workload,
        prefix_tokens=prefix_tokens,
        own_tokens=own_tokens,
        generated_tokens=generated_tokens,
        turns=turns,
    )
    plan = LoadPlan(
        workload=workload,
        arrivals=_arrivals(users, rate, arrivals, max_in_flight, num_conversations, seed),
        num_conversations=num_conversations,
        sizes=sizes,
        repetitions=repetitions,
        cases=(CacheCase.COLD, CacheCase.WARM) if warm else (CacheCase.COLD,),
        warm_up=warm_up,
        seed=seed,
    )
    config = client_config(manager)
    if timeout is not None:
        config = replace(config, timeout=timeout)
    looks = waste if waste is not None else workload is LoadWorkload.MIXED
    measured = Measured(plan)
    engine = KvpoolEngine(config, model=model, priority=priority, tenant=tenant)
    try:
        asyncio.run(_measure(engine, measured, looks=looks, stall_seconds=stall_seconds))
    except KeyboardInterrupt:
        print("kvpool: interrupted; the figures are of the runs that were complete", file=sys.stderr)
        _show(measured, as_json=as_json)
        raise typer.Exit(INTERRUPTED) from None
    _show(measured, as_json=as_json)
    if (error := measured.error) is not None:
        shown = error if isinstance(error, KvpoolError) else KvpoolError(f"{type(error).__name__}: {error}")
        remark = "the run was ended there, its figures are of the requests that were complete"
        print(f"{error_line(shown)}; {remark}", file=sys.stderr)
    if measured.error is not None or any(run.num_refused for runs in measured.runs.values() for run in runs):
        raise typer.Exit(1)


def _arrivals(
    users: int | None,
    rate: float | None,
    pattern: Pattern | None,
    max_in_flight: int | None,
    num_conversations: int,
    seed: int,
) -> Arrivals:
    if rate is None:
        if pattern is not None or max_in_flight is not None:
            raise InvalidRequest(
                "--arrivals and --max-in-flight are of the open loop: give --rate too", reason="BAD_FIELD"
            )
        return ClosedLoop(users or min(num_conversations, _MAX_DEFAULT_USERS))
    if users is not None:
        raise InvalidRequest(
            "--users is a closed loop and --rate an open one: give one of them; --max-in-flight bounds an open loop",
            reason="BAD_FIELD",
        )
    return OpenLoop(rate, pattern or Pattern.POISSON, max_in_flight or DEFAULT_MAX_IN_FLIGHT, seed)


async def _measure(engine: KvpoolEngine, measured: Measured, *, looks: bool, stall_seconds: float) -> None:
    """Measure with a progress bar on stderr."""
    plan = measured.plan
    console = stderr_console()
    console.print(report.describe(plan), markup=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("asking what is served", total=None)

        def on_run(what: str) -> None:
            engine.forget()
            progress.reset(bar, total=plan.num_requests, description=what)
            if not console.is_terminal:
                console.print(what, markup=False)

        def on_request(sample: RequestSample) -> None:
            progress.advance(bar)

        watch = LoadObserver(
            on_request=on_request, look_at_blocks=engine.waste if looks else None, stall_seconds=stall_seconds
        )
        try:
            await measure(engine, plan, measured, watch, on_run)
        finally:
            await engine.close()


def _show(measured: Measured, *, as_json: bool) -> None:
    if as_json:
        print_json(report.as_json(measured))
    elif measured.runs:
        console = stdout_console()
        if measured.served is not None:
            console.print(printed(f"model {measured.served.model}"))
        console.print(report.tables(measured))

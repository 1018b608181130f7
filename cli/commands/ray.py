"""`kvpool ray`: runs a cluster on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from kvpool.client.config import MANAGER_VARIABLE
from kvpool.client.errors import KvpoolError
from kvpool.process.signals import exit_status

from ..launch.cluster import GATEWAY_NAME, HOST, num_cores
from ..launch.trial import WorkerRefused
from ..on_ray.plan import RayPlan, make_plan, mark_folder
from ..on_ray.settings import DEFAULT_NAMESPACE, FLAGS, RaySettings
from ..pass_through import PassThrough
from ..terminal import JsonOption, print_json, printed, stderr_console, stdout_console, typed_command

if TYPE_CHECKING:
    from ..on_ray.cluster import RayCluster

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_SECONDS: Final = 1.0

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="KVPOOL_RAY_ADDRESS",
        help="host:port of the Ray cluster. Default: $RAY_ADDRESS, else the one that runs here.",
    ),
]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", envvar="KVPOOL_RAY_NAMESPACE", help="Ray namespace of the cluster of kvpool.")
]

ray = typer.Typer(
    help="A cluster on the nodes of a Ray cluster.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Stopped(Exception):
    """A signal has asked to stop."""


class _Signals:
    """The signals that have asked to stop. They are checked only where work may end: Ray's own calls do not expect an exception."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._come = threading.Event()
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        self._numbers.append(number)
        self._come.set()

    @property
    def exit_status(self) -> int:
        """Exit status after the first signal; 0: none has come."""
        return exit_status(self._numbers[0]) if self._numbers else 0

    def wait(self, seconds: float) -> None:
        """Wait. Raises _Stopped as soon as a signal has come."""
        if self._come.wait(seconds):
            raise _Stopped

    def checked(self, shown: Status, ending: str = "", first: int = 1) -> Callable[[str], None]:
        """Return a function that shows progress, without a terminal as a line for each change. It raises _Stopped once `first`
        signals have come."""
        last = ""

        def show(line: str) -> None:
            nonlocal last
            shown.update(printed(line + ending))
            if line != last and not shown.console.is_terminal:
                shown.console.print(printed(line), soft_wrap=True)
            last = line
            if len(self._numbers) >= first:
                raise _Stopped

        return show


@ray.command("up", cls=PassThrough, add_help_option=False)
def up(context: typer.Context) -> None:
    """Start a manager and its workers on the nodes of a Ray cluster, or let the cluster grow or shrink."""
    sys.exit(_up(*FLAGS.load(context.args)))


@ray.command("down")
def down(address: AddressOption = None, namespace: NamespaceOption = DEFAULT_NAMESPACE) -> None:
    """Let all processes finish and leave: workers end their requests, the managers are last."""
    cluster = _connected(address, namespace)
    sys.exit(_down(cluster, _Signals(), 1))


@ray.command("status")
def status(
    address: AddressOption = None, namespace: NamespaceOption = DEFAULT_NAMESPACE, as_json: JsonOption = False
) -> None:
    """Which process is on which node, and which is not there."""
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints there what happens to its nodes
        cluster = _connected(address, namespace)
        from ..on_ray.connection import disconnect

        services = [_service_object(cluster, name, service) for name, service in cluster.describe().items()]
        disconnect()
    if as_json:
        print_json({"namespace": namespace, "services": services})
        return
    show_services(stdout_console(), namespace, services)


def show_services(console: Console, namespace: str, services: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of `kvpool ray status`."""
    if not services:
        console.print(printed(f"no cluster runs in the namespace {namespace}; start one with `kvpool ray up`"))
        return
    table = Table("process", "state", "node", "address", "pid", box=None, pad_edge=False)
    for service in services:
        columns = ("name", "state", "host", "address", "pid")
        table.add_row(*(printed(str(service[column] or "")) for column in columns))
    console.print(table)


def _service_object(cluster: RayCluster, name: str, service: Mapping[str, Any] | None) -> dict[str, object]:
    """Return the object that `status --json` prints for a process. The names are part of the interface."""
    described = service or {}
    return {"name": name, "state": _state(cluster, name, service)} | {
        key: described.get(key) or None for key in ("node", "host", "address", "pid")
    }


def _state(cluster: RayCluster, name: str, service: Mapping[str, Any] | None) -> str:
    if service is None:
        return "no node has room for it" if cluster.is_waiting(name) else "is being started"
    if service["problem"]:
        return str(service["problem"])
    return "runs" if service["pid"] else "is being started"


def _connected(
    address: str | None, namespace: str, *, is_quiet: bool = True, own_cpus: int | None = None
) -> RayCluster:
    """Connect to Ray. Raises KvpoolError if Ray is not installed or does not answer."""
    if find_spec("ray") is None:
        raise KvpoolError(
            "ray is not installed: `kvpool ray` needs an extra, pip install 'kvpool[ray]', on every node",
            reason="NO_RAY",
        )
    from ..on_ray.cluster import RayCluster  # imports Ray, which takes a second
    from ..on_ray.connection import connect

    if connect(address, namespace, is_quiet=is_quiet, own_cpus=own_cpus):
        stdout_console().print(
            f"no Ray cluster runs on this machine: started one on {HOST}, which ends with this command"
        )
    return RayCluster(namespace)


def _up(settings: RaySettings, worker_arguments: list[str]) -> int:
    console, progress = stdout_console(), stderr_console()
    one_machine = None if settings.detach else num_cores() + settings.workers * settings.cpus_per_worker
    with progress.status("connecting to Ray"):
        cluster = _connected(settings.address, settings.namespace, is_quiet=False, own_cpus=one_machine)
    from ..on_ray.cluster import has_gpus

    shared = settings.shared_folder
    mark = "" if shared is None else mark_folder(shared)
    plan = make_plan(settings, worker_arguments, has_gpus=has_gpus(), mark=mark)
    signals = _Signals()  # Ray has set its own before
    try:
        was_there = bool(cluster.names())
        with progress.status("starting") as shown:
            workers = cluster.up(plan, signals.checked(shown))
    except WorkerRefused as refused:
        for line in FLAGS.say_refusal(refused, worker_arguments):
            print(line, file=sys.stderr)
        return refused.exit_status
    except _Stopped:
        print("kvpool ray up: interrupted; what this command had started was removed", file=sys.stderr)
        return signals.exit_status
    for worker in workers:
        console.print(printed(f"{worker.worker_id} serves {worker.model_name} on {worker.address}"), soft_wrap=True)
    stays = not settings.detach and not was_there
    _say_ready(cluster, plan, console, stays)
    if not stays:
        return 0
    try:
        _follow(cluster, signals, lambda line: console.print(printed(line), style="bold", soft_wrap=True))
    except (_Stopped, OSError):  # or there is nobody left to read
        return _down(cluster, signals, 2)
    console.print("every process has left")
    return 0


def _down(cluster: RayCluster, signals: _Signals, patience: int) -> int:
    """Let all processes leave; after `patience` signals they are ended at once. Returns the exit status."""
    ending = "; Ctrl-C ends everything at once"
    try:
        with stderr_console().status(f"leaving{ending}") as shown:
            num_services = cluster.down(signals.checked(shown, ending, patience))
    except _Stopped:
        cluster.remove()
        print("kvpool ray: ended at once, what ran was lost", file=sys.stderr)
    else:
        stdout_console().print(f"{num_services} processes have left" if num_services else "no process is left")
    return signals.exit_status


def _say_ready(cluster: RayCluster, plan: RayPlan, console: Console, stays: bool) -> None:
    """Print where each process is, and what to type next. `stays`: this command stays until the cluster ends."""
    from ..on_ray.cluster import addresses_of

    services = cluster.describe()
    for spec in plan.managers:
        if (service := services.get(spec.name)) is not None:
            console.print(printed(f"{spec.name} is on {service['address']}"), soft_wrap=True)
    gateway = services.get(GATEWAY_NAME)
    if gateway is not None:
        url = f"http://{gateway['address']}"
        console.print(printed(f"{GATEWAY_NAME} serves OpenAI's API on {url}/v1, and a page on {url}"), soft_wrap=True)
    console.print(
        "Ray reports usage to its makers, unless RAY_USAGE_STATS_ENABLED=0 was set where its nodes were started",
        soft_wrap=True,
    )
    command = typed_command()
    ends = "Ctrl-C here stops everything" if stays else f"`{command} ray down` stops everything"
    managers = addresses_of(services)
    asks = f"{MANAGER_VARIABLE}={managers} {command}"
    console.print(
        printed(
            f"ready: `{asks} chat` or `{asks} top`; with another --workers this command lets the cluster grow or shrink; {ends}",
        ),
        style="bold",
        soft_wrap=True,
    )


def _follow(cluster: RayCluster, signals: _Signals, say: Callable[[str], None]) -> None:
    """Report starts and ends of the processes until none is left. Raises _Stopped."""
    before: dict[str, str] = {}
    while services := cluster.describe():
        now = {
            name: f"{service['host']} (pid {service['pid']})" if service and service["pid"] else ""
            for name, service in services.items()
        }
        for name, place in before.items():
            if name not in now:
                say(f"{name} has left")
            elif now[name] != place:
                say(f"{name} is up again, on {now[name]}" if now[name] else f"{name} is down")
        before = now
        signals.wait(_LOOK_SECONDS)

"""Makes, lists and drains the actors of one cluster on Ray, for `kvpool ray`."""

from __future__ import annotations

from . import before_ray  # noqa: F401

# isort: split
import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import ray
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.errors import InvalidRequest, KvpoolError, Unavailable
from kvpool.process.version import installed_version
from kvpool.v1 import cache_pb2

from ..launch.children import ChildSpec
from ..launch.cluster import GATEWAY_NAME, listens
from ..launch.trial import WorkerRefused, try_settings
from .connection import ray_errors
from .places import Resources, free_resources, make_place, places, remove_place, wait_for_room, waits_for_room
from .plan import MANAGERS_NAME, SMALL_CPUS, RayPlan, ServiceSpec, is_manager, is_worker
from .service import Service, remove_actor

_ANSWER_SECONDS: Final = 2.0
"""Time for the answer of a live actor."""
_LOOK_SECONDS: Final = 1.0
_MANY_CALLS: Final = 10_000
"""Calls at the same time at a manager's actor: each worker has one pending there."""
_MOST_STARTS: Final = 4
"""Starts of one process after which a command that waits for it gives up."""
_SMALL: Final = {"CPU": SMALL_CPUS}
_OURS: Final = re.compile(r"(manager|worker)-[0-9]+|gateway")
"""Names of our actors; others may be in the same namespace."""
_TURN_NAME: Final = "kvpool-ray-command"

Progress = Callable[[str], None]
Description = dict[str, Any]
"""Description that an actor gives of itself."""


class CommandTurn:
    """An actor whose name only one command can have at a time. Ray ends it with the command."""


class RayCluster:
    """The actors of one namespace of the Ray cluster that this process is connected to. Raises Unavailable if Ray fails."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    @ray_errors()
    def names(self) -> list[str]:
        """List the names of our actors, managers first."""
        actors = ray.util.list_named_actors(all_namespaces=True)
        names = [actor["name"] for actor in actors if actor["namespace"] == self._namespace]
        return sorted(filter(_OURS.fullmatch, names), key=_order)

    @ray_errors()
    def describe(self, names: Iterable[str] | None = None) -> dict[str, Description | None]:
        """Ask each actor for its description; None: it does not answer, since it is being started or no node has room for it."""
        calls = {}
        descriptions: dict[str, Description | None] = dict.fromkeys(self.names() if names is None else names)
        for name in descriptions:
            with contextlib.suppress(ValueError):
                calls[ray.get_actor(name, namespace=self._namespace).describe.remote()] = name
        if calls:
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_SECONDS)
            for call in done:
                with contextlib.suppress(RayError):
                    descriptions[calls[call]] = ray.get(call)
        return descriptions

    def is_waiting(self, name: str) -> bool:
        """Whether no node has room for this process."""
        return waits_for_room(MANAGERS_NAME if is_manager(name) else name)

    @ray_errors()
    def up(self, plan: RayPlan, on_progress: Progress) -> list[cache_pb2.WorkerDescription]:
        """Make the missing actors of the plan, let workers that it does not have leave, and wait until all serve; returns the
        workers.

        Raises InvalidRequest if the cluster runs with other settings, WorkerRefused if a worker cannot use its own, KvpoolError if
        a process cannot start, Unavailable if another command changes the cluster. After any error, also of `on_progress`, the new
        actors are removed.
        """
        with self._alone():
            existing = self._remove_leftovers()
            self._require_same(plan, existing)
            made: list[str] = []
            try:
                self._make_managers(plan, existing, made, on_progress)
                self._make_workers(plan, existing, made, on_progress)
                if plan.gateway is not None and GATEWAY_NAME not in existing:
                    made.append(GATEWAY_NAME)
                    self._make(plan.gateway, make_place(GATEWAY_NAME, [_SMALL]), 0, _SMALL)
                worker_names = {spec.name for spec in plan.workers}
                self._drain([name for name in existing if is_worker(name) and name not in worker_names], on_progress)
                return self._wait_until_ready(plan, on_progress)
            except BaseException:
                self._remove(reversed(made))  # actors before their place
                raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other commands from changing the cluster meanwhile. Raises Unavailable if one does so already."""
        try:
            turn = ray.remote(num_cpus=0)(CommandTurn).options(name=_TURN_NAME, namespace=self._namespace).remote()
            try:
                ray.get(turn.__ray_ready__.remote())
            except ActorDiedError:
                # Of two commands that begin at once, the other one may have got the name.
                ray.get_actor(_TURN_NAME, self._namespace)
                raise ActorAlreadyExistsError(_TURN_NAME) from None
        except ActorAlreadyExistsError as error:
            raise Unavailable(
                f"another `kvpool ray up` or `down` changes the cluster in the namespace {self._namespace}: wait for it, or end it "
                "with Ctrl-C",
                reason="BUSY",
            ) from error
        try:
            yield
        finally:
            ray.kill(turn)

    def _remove_leftovers(self) -> dict[str, Description | None]:
        """Remove what a killed command has left: actors whose process has ended, and places without an actor. Returns the
        descriptions of the other actors."""
        services = self.describe()
        left = [name for name, service in services.items() if service and service["has_ended"]]
        self._remove(left)
        for name in left:
            del services[name]
        used = {MANAGERS_NAME if is_manager(name) else name for name in services}
        for name in places() - used:
            if name == MANAGERS_NAME or _OURS.fullmatch(name):
                remove_place(name)
        return services

    def _require_same(self, plan: RayPlan, existing: Mapping[str, Description | None]) -> None:
        """Raise an error unless the cluster runs with the plan's settings: a worker with other settings would be a surprise, a
        manager with another folder a danger."""
        managers = [description for name, description in existing.items() if is_manager(name)]
        answers = [description for description in managers if description is not None]
        if managers and not answers:
            raise Unavailable(
                f"a cluster runs in the namespace {self._namespace}, but no manager answers: try again, or end it with "
                "`kvpool ray down`",
                reason="NO_MANAGER",
            )
        for description in answers:
            if description["version"] != installed_version():
                raise InvalidRequest(
                    f"the cluster in the namespace {self._namespace} is one of kvpool {description['version']}, this is "
                    f"{installed_version()}: end it with `kvpool ray down`, or use its version",
                    reason="OTHER_VERSION",
                )
            if description["record"] != plan.managers[0].record:
                running = "; ".join(description["record"])
                raise InvalidRequest(
                    f"the cluster in the namespace {self._namespace} runs with other settings ({running}): give these to let it "
                    "grow or shrink, end it with `kvpool ray down`, or start another one in another --namespace",
                    reason="OTHER_SETTINGS",
                )
        gateway = existing.get(GATEWAY_NAME)
        if plan.gateway and gateway and gateway["address"] and _port_of(gateway) != plan.gateway.port:
            raise InvalidRequest(
                f"the gateway is on {gateway['address']}: leave --http out, or end the cluster with `kvpool ray down` first",
                reason="OTHER_SETTINGS",
            )

    def _make_managers(self, plan: RayPlan, existing: Collection[str], made: list[str], on_progress: Progress) -> None:
        missing = [spec for spec in plan.managers if spec.name not in existing]
        if not missing:
            return
        if len(missing) == len(plan.managers):
            made.append(MANAGERS_NAME)
        num_nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= SMALL_CPUS for node in ray.nodes())
        if num_nodes < len(plan.managers):
            raise InvalidRequest(
                f"{len(plan.managers)} managers need as many nodes, so that losing a node loses one manager; the Ray cluster has "
                f"{num_nodes} with room for one: add nodes, or give --managers {max(num_nodes, 1)}",
                reason="TOO_FEW_NODES",
            )
        # STRICT_SPREAD keeps each on another node, even after one of them had to move.
        group = make_place(MANAGERS_NAME, [_SMALL] * len(plan.managers), strategy="STRICT_SPREAD")
        wait_for_room(group, f"for {len(plan.managers)} managers, each on another node", on_progress)
        for index, spec in enumerate(plan.managers):
            if spec in missing:
                made.append(spec.name)
                self._make(spec, group, index, _SMALL)

    def _make_workers(self, plan: RayPlan, existing: Collection[str], made: list[str], on_progress: Progress) -> None:
        resources = {"CPU": float(plan.worker_cpus), "GPU": float(plan.worker_gpus)}
        is_tried = False
        for spec in plan.workers:
            if spec.name not in existing:
                made.append(spec.name)
                group = make_place(spec.name, [resources])
                if not is_tried:  # all workers have the same settings
                    self._try(spec, group, resources, on_progress)
                    is_tried = True
                self._make(spec, group, 0, resources)

    def _make(self, spec: ServiceSpec, group: PlacementGroup, bundle: int, resources: Resources) -> None:
        ray.remote(Service).options(
            name=spec.name,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            max_concurrency=_MANY_CALLS if is_manager(spec.name) else 100,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        ).remote(dataclasses.asdict(spec))

    def _try(self, spec: ServiceSpec, group: PlacementGroup, resources: Resources, on_progress: Progress) -> None:
        """Let a worker check its settings on the node where the first one will run. Raises WorkerRefused."""
        room = " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if amount)
        wait_for_room(group, f"for {spec.name}, {room}", on_progress)
        task = ray.remote(max_retries=0)(try_worker).options(
            num_cpus=resources["CPU"],
            num_gpus=resources["GPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        )
        answer = task.remote(dataclasses.asdict(spec))
        while not ray.wait([answer], timeout=_LOOK_SECONDS)[0]:
            on_progress("trying the workers' settings")
        refused = ray.get(answer)
        if refused is not None:
            raise WorkerRefused(refused["lines"], refused["exit_status"])

    def _wait_until_ready(self, plan: RayPlan, on_progress: Progress) -> list[cache_pb2.WorkerDescription]:
        """Wait until a manager answers and lists all workers; returns them. Raises KvpoolError if a process cannot be started."""
        names = [spec.name for spec in plan.workers]
        pids: dict[str, set[int]] = {}
        while True:
            services = self.describe()
            self._require_chance(plan, services, pids)
            live = {worker.worker_id: worker for worker in asyncio.run(_live_workers(addresses_of(services)))}
            missing = [name for name in names if name not in live]
            if not missing and (plan.gateway is None or _listens(services.get(GATEWAY_NAME))):
                return [live[name] for name in names]
            on_progress(self._say_missing(missing, len(names), services) if missing else "waiting for the gateway")
            time.sleep(_LOOK_SECONDS / 2)

    def _require_chance(
        self, plan: RayPlan, services: dict[str, Description | None], pids: dict[str, set[int]]
    ) -> None:
        """Raise KvpoolError if waiting longer is useless. `pids` has the pids of each process so far, and is updated."""
        for name in plan.names:
            if name not in services:
                raise KvpoolError(
                    f"{name} has left, or Ray cannot make its actor: is kvpool {installed_version()} with its extra [ray] "
                    "installed on every node?",
                    reason="CHILD_ENDED",
                )
            service = services[name]
            if service is None:
                continue
            if service["problem"]:
                raise KvpoolError(f"{name}: {service['problem']}", reason="CHILD_ENDED")
            if service["pid"]:
                pids.setdefault(name, set()).add(service["pid"])
            if len(pids.get(name, ())) >= _MOST_STARTS:
                raise KvpoolError(
                    f"{name} has ended {_MOST_STARTS - 1} times on {service['host']}: its log above says why",
                    reason="CHILD_ENDED",
                )

    def _say_missing(self, missing: Sequence[str], num_workers: int, services: dict[str, Description | None]) -> str:
        said = f"{num_workers - len(missing)} of {num_workers} workers ready"
        unplaced = [name for name in missing if services.get(name) is None and self.is_waiting(name)]
        if unplaced:
            return f"{said}; no node has room for {', '.join(unplaced)}: the nodes have {free_resources()} left"
        return f"{said}, waiting for {', '.join(missing)}"

    def _drain(self, names: Sequence[str], on_progress: Progress) -> None:
        """Let these processes finish and leave, all at once, and remove their actors."""
        leaving = {}
        for name in names:
            with contextlib.suppress(ValueError):  # it has removed itself
                leaving[ray.get_actor(name, namespace=self._namespace).drain.remote()] = name
        while leaving:
            on_progress(f"leaving: {', '.join(sorted(leaving.values()))}")
            done, _ = ray.wait(list(leaving), timeout=_LOOK_SECONDS)
            # An actor without a node never gets the call. Others answer, or end with an error, e.g. those that remove themselves.
            for call in {*done, *(call for call, name in leaving.items() if self.is_waiting(name))}:
                del leaving[call]
        self._remove(names)

    @ray_errors()
    def down(self, on_progress: Progress) -> int:
        """Let all processes leave, the managers last. Returns the number of processes. Raises Unavailable if another command
        changes the cluster."""
        with self._alone():
            names = self.names()
            managers = [name for name in names if is_manager(name)]
            self._drain([name for name in names if name not in managers], on_progress)
            self._drain(managers, on_progress)
            self._remove_leftovers()
            return len(names)

    @ray_errors()
    def remove(self) -> None:
        """End all actors at once, and give their resources back to Ray."""
        self._remove(self.names())
        self._remove_leftovers()

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            remove_actor(name, self._namespace)


async def _live_workers(managers: str) -> list[cache_pb2.WorkerDescription]:
    if not managers:
        return []
    async with Client(config=ClientConfig(manager=managers, first_contact=_LOOK_SECONDS)) as client:
        with contextlib.suppress(KvpoolError):
            return list((await client.describe(timeout=_LOOK_SECONDS)).workers)
    return []


def has_gpus() -> bool:
    """Whether any node of the Ray cluster has a GPU."""
    return bool(ray.cluster_resources().get("GPU"))


def addresses_of(services: dict[str, Description | None]) -> str:
    """Return the addresses of the managers, in the form of --manager."""
    return ",".join(
        service["address"] for name, service in services.items() if service and is_manager(name) and service["address"]
    )


def try_worker(spec: dict[str, Any]) -> dict[str, Any] | None:
    """Check a worker's settings; runs on its node. Returns its output and exit status; None: it can use the settings."""
    service = ServiceSpec(**spec)
    child = ChildSpec(service.name, service.command(ray.util.get_node_ip_address(), 0), service.variables)
    try:
        asyncio.run(try_settings(child))
    except WorkerRefused as refused:
        return {"lines": refused.lines, "exit_status": refused.exit_status}
    return None


def _listens(service: Description | None) -> bool:
    return bool(service and service["address"] and asyncio.run(listens(service["host"], _port_of(service))))


def _port_of(service: Description) -> int:
    return int(service["address"].rpartition(":")[2])


def _order(name: str) -> tuple[int, int, str]:
    """Return the sort key of a name: managers, workers, the gateway, each kind by number."""
    kind, _, number = name.rpartition("-")
    kinds = {"manager": 0, "worker": 1}
    return kinds.get(kind, 2), int(number) if number.isdigit() else 0, name

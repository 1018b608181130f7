"""The processes of one cluster on Ray, as `kvpool ray` sees them: makes their actors, lists them, and lets them leave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

# Before Ray is imported. It does not replace a loopback address by the machine's own then, which nothing listens on.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvpool.process.version import installed_version
from kvpool.v1 import cache_pb2

from ...client import Client
from ...config import ClientConfig
from ...errors import InvalidRequest, KvpoolError, Unavailable
from ..launch.children import ChildSpec
from ..launch.trial import WorkerRefused, try_settings
from .plan import GATEWAY_NAME, MANAGERS_NAME, SMALL_CPUS, Plan, ServiceSpec
from .service import Service, remove_actor

LOOPBACK: Final = "127.0.0.1"
_ANSWER_SECONDS: Final = 2.0
"""For an actor that is alive."""
_LOOK_SECONDS: Final = 1.0
_MANY_CALLS: Final = 10_000
"""At a manager's actor, at the same time: each worker has one there."""

_OURS: Final = re.compile(r"(manager|worker)-[0-9]+|gateway")
"""Names of actors; others may be in the same namespace."""

Progress = Callable[[str], None]
Resources = dict[str, float]


def connect(address: str | None, namespace: str, *, is_quiet: bool = True, own_cpus: int | None = None) -> bool:
    """Connect to the Ray cluster. With `own_cpus`, if there is none, start one of a single node on the loopback, which ends with
    this process; returns whether that was done. Raises Unavailable."""
    # Our actors are removed before their placement group, so that the advice against this does not apply.
    logging.getLogger("ray.actor").addFilter(lambda record: "restartable detached actor" not in record.getMessage())
    options: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": not is_quiet,
        "logging_level": logging.WARNING,
    }
    try:
        ray.init(address=address or "auto", **options)
        return False
    except ConnectionError as error:
        if address is not None or os.environ.get("RAY_ADDRESS") or own_cpus is None:
            raise _no_ray(address, error) from error
    except (RuntimeError, ValueError, RayError) as error:
        raise _no_ray(address, error) from error
    try:
        ray.init(address="local", num_cpus=own_cpus, include_dashboard=False, **options)
    except (RuntimeError, ValueError, RayError) as error:
        raise Unavailable(f"Ray does not start on this machine: {error}", reason="NO_RAY") from error
    return True


def _no_ray(address: str | None, error: Exception) -> Unavailable:
    where = f"at {address}" if address else "on this machine"
    first_line = str(error).strip().partition("\n")[0]
    return Unavailable(
        f"no Ray cluster answers {where} ({first_line}); start its nodes with `ray start`, and run this on one of them, or name "
        "the cluster with --address",
        reason="NO_RAY",
    )


class RayCluster:
    """The actors of one namespace of the Ray cluster that this process is connected to."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def disconnect(self) -> None:
        """From Ray; the actors stay."""
        ray.shutdown()

    def names(self) -> list[str]:
        """Of all actors that are to run, the managers' first. Raises Unavailable."""
        try:
            listed = ray.util.list_named_actors(all_namespaces=True)
        except (RuntimeError, RayError) as error:
            raise Unavailable(f"the head of the Ray cluster does not answer: {error}", reason="NO_RAY") from error
        found = [actor["name"] for actor in listed if actor["namespace"] == self._namespace]
        return sorted(filter(_OURS.fullmatch, found), key=_order)

    def describe(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any] | None]:
        """What each actor says of itself; None where it does not answer: it is being started, or no node has room for it."""
        calls = {}
        found: dict[str, dict[str, Any] | None] = dict.fromkeys(self.names() if names is None else names)
        for name in found:
            with contextlib.suppress(ValueError):
                calls[ray.get_actor(name, namespace=self._namespace).describe.remote()] = name
        if calls:
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_SECONDS)
            for call in done:
                with contextlib.suppress(RayError):
                    found[calls[call]] = ray.get(call)
        return found

    def up(self, plan: Plan, on_progress: Progress) -> list[cache_pb2.WorkerDescription]:
        """Make the actors of the plan that do not exist, let workers leave that it does not have, and wait until all serve; returns
        the workers.

        Raises InvalidRequest if the cluster runs with other settings, WorkerRefused if a worker cannot use its own, KvpoolError if
        a process cannot start. Whatever is raised, by `on_progress` too, what was made is removed then.
        """
        existing = set(self.names())
        self._require_same(plan, existing)
        made: list[str] = []
        try:
            self._make_managers(plan, existing, made, on_progress)
            self._make_workers(plan, existing, made, on_progress)
            if plan.gateway is not None and GATEWAY_NAME not in existing:
                made.append(GATEWAY_NAME)
                small = {"CPU": SMALL_CPUS}
                self._make(plan.gateway, self._group(GATEWAY_NAME, [small]), 0, small)
            wanted = {spec.name for spec in plan.workers}
            self.drain([name for name in existing if name.startswith("worker-") and name not in wanted], on_progress)
            return self._wait_until_ready(plan, on_progress)
        except BaseException:
            self.remove(made)
            raise

    def _require_same(self, plan: Plan, existing: set[str]) -> None:
        """A worker with other settings than the others would be a surprise, a manager of another folder a danger."""
        managers = self.describe(name for name in existing if name.startswith("manager-"))
        answers = [found for found in managers.values() if found is not None]
        if managers and not answers:
            raise Unavailable(
                f"a cluster runs in the namespace {self._namespace}, but none of its managers does at the moment: try again, or "
                "end it with `kvpool ray down`",
                reason="NO_MANAGER",
            )
        for found in answers:
            if found["version"] != installed_version():
                raise InvalidRequest(
                    f"the cluster in the namespace {self._namespace} is one of kvpool {found['version']}, this is "
                    f"{installed_version()}: end it with `kvpool ray down`, or use its version",
                    reason="OTHER_VERSION",
                )
            if found["record"] != plan.record:
                running = "; ".join(found["record"])
                raise InvalidRequest(
                    f"the cluster in the namespace {self._namespace} runs with other settings ({running}): give these to let it "
                    "grow or shrink, end it with `kvpool ray down`, or start another one in another --namespace",
                    reason="OTHER_SETTINGS",
                )

    def _make_managers(self, plan: Plan, existing: set[str], made: list[str], on_progress: Progress) -> None:
        missing = [spec for spec in plan.managers if spec.name not in existing]
        if not missing:
            return
        small = {"CPU": SMALL_CPUS}
        if len(missing) == len(plan.managers):
            made.append(MANAGERS_NAME)
        num_nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= SMALL_CPUS for node in ray.nodes())
        if num_nodes < len(plan.managers):
            raise InvalidRequest(
                f"{len(plan.managers)} managers need as many nodes, so that a lost one takes only one of them; the Ray cluster has "
                f"{num_nodes} with room for one: add nodes, or give --managers {max(num_nodes, 1)}",
                reason="TOO_FEW_NODES",
            )
        # Each on another node, also after one of them had to move.
        group = self._group(MANAGERS_NAME, [small] * len(plan.managers), strategy="STRICT_SPREAD")
        self._wait_for_room(group, f"for {len(plan.managers)} managers, each on another node", on_progress)
        for index, spec in enumerate(plan.managers):
            if spec in missing:
                made.append(spec.name)
                self._make(spec, group, index, small)

    def _make_workers(self, plan: Plan, existing: set[str], made: list[str], on_progress: Progress) -> None:
        resources = {"CPU": float(plan.worker_cpus), "GPU": float(plan.worker_gpus)}
        is_tried = False
        for spec in plan.workers:
            if spec.name not in existing:
                made.append(spec.name)
                group = self._group(spec.name, [resources])
                if not is_tried:  # their settings differ in nothing that can be refused
                    self._try(spec, group, resources, on_progress)
                    is_tried = True
                self._make(spec, group, 0, resources)

    def _group(self, name: str, bundles: Sequence[Resources], strategy: str = "SPREAD") -> PlacementGroup:
        """The placement group of this name, made if there is none. Ray spreads those of one bundle over the nodes."""
        with contextlib.suppress(ValueError):
            group = get_placement_group(name)
            if placement_group_table(group)["state"] != "REMOVED":
                return group
        wanted = [{kind: amount for kind, amount in bundle.items() if amount} for bundle in bundles]
        return placement_group(wanted, strategy=strategy, name=name, lifetime="detached")

    def _make(self, spec: ServiceSpec, group: PlacementGroup, bundle: int, resources: Resources) -> None:
        ray.remote(Service).options(
            name=spec.name,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            max_concurrency=_MANY_CALLS if spec.is_manager else 100,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        ).remote(dataclasses.asdict(spec))

    def _wait_for_room(self, group: PlacementGroup, what: str, on_progress: Progress) -> None:
        while not group.wait(timeout_seconds=1):
            on_progress(f"waiting for room {what}: the nodes have {_free_resources()} left")

    def _try(self, spec: ServiceSpec, group: PlacementGroup, resources: Resources, on_progress: Progress) -> None:
        """Let a worker check its settings where the first of them will run. Raises WorkerRefused."""
        room = " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if amount)
        self._wait_for_room(group, f"for {spec.name}, {room}", on_progress)
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

    def _wait_until_ready(self, plan: Plan, on_progress: Progress) -> list[cache_pb2.WorkerDescription]:
        """Until a manager answers and lists all workers; returns them. Raises KvpoolError if a process cannot be started."""
        names = [spec.name for spec in plan.workers]
        while True:
            services = self.describe()
            for name, service in services.items():
                if service and service["problem"]:
                    raise KvpoolError(f"{name}: {service['problem']}", reason="CHILD_ENDED")
            live = {worker.worker_id: worker for worker in asyncio.run(_live_workers(addresses_of(services)))}
            missing = [name for name in names if name not in live]
            if not missing and (plan.gateway is None or _listens(services.get(GATEWAY_NAME))):
                return [live[name] for name in names]
            on_progress(self._say_missing(missing, len(names), services) if missing else "waiting for the gateway")
            time.sleep(_LOOK_SECONDS / 2)

    def _say_missing(self, missing: Sequence[str], num_workers: int, services: dict[str, dict[str, Any] | None]) -> str:
        said = f"{num_workers - len(missing)} of {num_workers} workers ready"
        homeless = [name for name in missing if services.get(name) is None and self.waits_for_room(name)]
        if homeless:
            return f"{said}; no node has room for {', '.join(homeless)}: the nodes have {_free_resources()} left"
        return f"{said}, waiting for {', '.join(missing)}"

    def waits_for_room(self, name: str) -> bool:
        """Whether no node has what this process needs."""
        try:
            group = get_placement_group(MANAGERS_NAME if name.startswith("manager-") else name)
        except ValueError:
            return False
        return bool(placement_group_table(group)["state"] in ("PENDING", "RESCHEDULING"))

    def drain(self, names: Sequence[str], on_progress: Progress) -> None:
        """Let these processes finish and leave, all at once, and remove their actors. May be interrupted: `remove` ends the
        rest."""
        alive = {name for name, service in self.describe(names).items() if service is not None}
        leaving = {
            ray.get_actor(name, namespace=self._namespace).drain.remote(): name for name in names if name in alive
        }
        while leaving:
            on_progress(f"leaving: {', '.join(sorted(leaving.values()))}")
            done, _ = ray.wait(list(leaving), timeout=_LOOK_SECONDS)
            for call in done:
                del leaving[call]  # with an error, if it has removed itself already
        self.remove(names)

    def down(self, on_progress: Progress) -> int:
        """Let all processes leave, the managers after all others. Returns how many there were."""
        names = self.names()
        managers = [name for name in names if name.startswith("manager-")]
        self.drain([name for name in names if name not in managers], on_progress)
        self.drain(managers, on_progress)
        self.remove([MANAGERS_NAME])
        return len(names)

    def remove(self, names: Iterable[str] | None = None) -> None:
        """End these actors at once, or all, and give back what Ray has reserved for them."""
        for name in [*self.names(), MANAGERS_NAME] if names is None else names:
            if name == MANAGERS_NAME:
                with contextlib.suppress(ValueError):
                    remove_placement_group(get_placement_group(name))
            else:
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


def addresses_of(services: dict[str, dict[str, Any] | None]) -> str:
    """The managers, as --manager takes them."""
    return ",".join(
        service["address"]
        for name, service in services.items()
        if service and name.startswith("manager-") and service["address"]
    )


def try_worker(spec: dict[str, Any]) -> dict[str, Any] | None:
    """Runs on the node of the worker: what it says of its settings, None if it can use them."""
    service = ServiceSpec(**spec)
    child = ChildSpec(service.name, service.command(ray.util.get_node_ip_address(), 0), service.variables)
    try:
        asyncio.run(try_settings(child))
    except WorkerRefused as refused:
        return {"lines": refused.lines, "exit_status": refused.exit_status}
    return None


def _listens(service: dict[str, Any] | None) -> bool:
    if not service or not service["address"]:
        return False

    async def connects() -> bool:
        host, _, port = service["address"].rpartition(":")
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    return asyncio.run(connects())


def _free_resources() -> str:
    found = ray.available_resources()
    return " and ".join(f"{found.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU") if found.get(kind) or kind == "CPU")


def _order(name: str) -> tuple[int, int, str]:
    """Managers, workers, the gateway; each kind by its numbers."""
    kind, _, number = name.rpartition("-")
    kinds = {"manager": 0, "worker": 1}
    return kinds.get(kind, 2), int(number) if number.isdigit() else 0, name

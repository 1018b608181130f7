"""Plans the processes of a cluster on Ray, and their command lines. Nothing here needs Ray."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvpool.client.config import MANAGER_VARIABLE
from kvpool.client.errors import InvalidRequest
from kvpool.process.services import GATEWAY_MODULE, MANAGER_MODULE, WORKER_MODULE, service_command
from kvpool.process.settings import CONFIG_VARIABLE, state_home

from ..launch.cluster import GATEWAY_NAME
from .settings import RaySettings

_MANAGER: Final = "manager-"
_WORKER: Final = "worker-"
MANAGERS_NAME: Final = "managers"
"""Name of the placement group of all managers."""
SMALL_CPUS: Final = 0.1
"""CPUs that Ray reserves for a manager or a gateway. They need up to a core, but a node of 16 cores shall have room for a worker
with 15."""
_OWN_PREFIX: Final = "KVPOOL_RAY_"
_OF_GATEWAY: Final = "KVPOOL_GATEWAY_"
"""Prefix of the gateway's variables. They are not shown, because they include keys."""
_MARK_FILE: Final = "shared"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process. All fields are strings, numbers and lists of them: between processes go its fields, not the object."""

    name: str
    """Name of the actor; it is also the worker_id of a worker."""
    namespace: str
    module: str
    managers: list[str]
    """Names of the managers."""
    record: list[str]
    """Settings that all starts of this cluster must have in common, one on each line."""
    arguments: list[str] = field(default_factory=list)
    """Arguments in addition to those for its address, the managers and its state folder."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables in addition to those of its node."""
    port: int = 0
    """Port to listen on; 0: any free one."""
    state_dir: str = ""
    """State folder of managers that elect by a lock, on a disk that all nodes share; empty: this process keeps its state on its
    node."""
    mark: str = ""
    """Content of the mark file in `state_dir`; a folder without it is on another disk."""

    @property
    def folder(self) -> Path:
        """Folder for the state of this process on its node."""
        return state_home() / "ray" / self.namespace / self.name

    @property
    def managers_file(self) -> Path:
        """File that lists the present addresses of the managers for this process."""
        return self.folder / "managers"

    def command(self, host: str, port: int) -> list[str]:
        """Return the command line for a node with this address. `port` is that of a manager or a gateway."""
        own = ["--host", host]
        if is_worker(self.name):
            own += ["--worker-id", self.name, "--state-dir", str(self.folder / "state")]
        else:
            own += ["--port", str(port)]
        if is_manager(self.name):
            own += ["--state-dir", self.state_dir or str(self.folder / "state")]
        else:
            own += ["--manager", f"file:{self.managers_file}"]
        return service_command(self.module, [*own, *self.arguments])


@dataclass(frozen=True, slots=True)
class RayPlan:
    """The processes that `kvpool ray up` is to start."""

    managers: list[ServiceSpec]
    workers: list[ServiceSpec]
    gateway: ServiceSpec | None
    worker_cpus: int
    worker_gpus: int

    @property
    def names(self) -> list[str]:
        """Names of all processes."""
        services = [*self.managers, *self.workers, *([] if self.gateway is None else [self.gateway])]
        return [spec.name for spec in services]


def make_plan(
    settings: RaySettings,
    worker_arguments: Sequence[str],
    *,
    has_gpus: bool,
    mark: str = "",
    environment: Mapping[str, str] = os.environ,
) -> RayPlan:
    """Make the plan. `has_gpus`: whether any node has a GPU. `mark` is that of the folder that the managers share."""
    gpus = int(has_gpus) if settings.gpus_per_worker is None else settings.gpus_per_worker
    names = [f"{_MANAGER}{index}" for index in range(settings.num_managers)]
    of_workers = ["--device", "cuda:0" if gpus else "cpu", *worker_arguments]
    # --election file for a manager alone too: one that is started again then waits until the one before has ended.
    election = settings.election or "file"
    state_dir = "" if settings.shared_folder is None else str(settings.shared_folder)
    variables = _variables(settings, environment)
    record = [
        f"--managers {settings.num_managers}",
        f"--port {settings.port}",
        f"--election {election}",
        f"--state-dir {state_dir or 'none'}",
        f"--cpus-per-worker {settings.cpus_per_worker}",
        f"--gpus-per-worker {gpus}",
        f"of the workers: {' '.join(worker_arguments) or 'none'}",
        *sorted(f"{name}={value}" for name, value in variables.items() if not name.startswith(_OF_GATEWAY)),
    ]

    common = ServiceSpec("", settings.namespace, "", managers=names, record=record, variables=variables)
    manager = replace(common, module=MANAGER_MODULE, arguments=["--election", election])
    if state_dir:
        manager = replace(manager, state_dir=state_dir, mark=mark)
    worker = replace(common, module=WORKER_MODULE, arguments=of_workers)
    gateway = replace(common, module=GATEWAY_MODULE, name=GATEWAY_NAME, port=settings.http or 0)
    return RayPlan(
        managers=[
            replace(manager, name=name, port=settings.port and settings.port + index)
            for index, name in enumerate(names)
        ],
        workers=[replace(worker, name=f"{_WORKER}{index}") for index in range(settings.workers)],
        gateway=None if settings.http is None else gateway,
        worker_cpus=settings.cpus_per_worker,
        worker_gpus=gpus,
    )


def _variables(settings: RaySettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the command that its processes get too."""
    passed = {
        name: value
        for name, value in environment.items()
        if name.startswith("KVPOOL_") and not name.startswith(_OWN_PREFIX) and name != MANAGER_VARIABLE
    }
    if settings.config is not None:
        passed[CONFIG_VARIABLE] = str(settings.config.expanduser().resolve())
    return passed


def is_manager(name: str) -> bool:
    """Whether this is the name of a manager's actor."""
    return name.startswith(_MANAGER)


def is_worker(name: str) -> bool:
    """Whether this is the name of a worker's actor."""
    return name.startswith(_WORKER)


def mark_folder(folder: Path) -> str:
    """Return the mark of the shared folder; make it if there is none. By the mark a manager distinguishes it from a folder of the
    same name on another disk. Raises InvalidRequest."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = secrets.token_hex(16)
        unfinished = folder / f"{_MARK_FILE}.{mark}"
        unfinished.write_text(mark)
        with contextlib.suppress(FileExistsError):
            (folder / _MARK_FILE).hardlink_to(unfinished)  # whole, or not at all; of two commands one is the first
        unfinished.unlink()
        mark = (folder / _MARK_FILE).read_text()
        if not re.fullmatch("[0-9a-f]{32}", mark):
            raise InvalidRequest(
                f"{folder / _MARK_FILE} is damaged: stop all managers that use --state-dir {folder}, and delete this file",
                reason="BAD_FIELD",
            )
        return mark
    except OSError as error:
        raise InvalidRequest(
            f"--state-dir {folder} cannot be used: {error.strerror}; give a folder on a disk that all nodes share, this one too",
            reason="BAD_FIELD",
        ) from error


def problem_of_disk(spec: ServiceSpec, host: str) -> str:
    """Say why this process may not use its folder; empty: it may. Two managers with two folders of one name would both lead."""
    if not spec.state_dir:
        return ""
    file = Path(spec.state_dir) / _MARK_FILE
    try:
        if file.read_text() == spec.mark:
            return ""
        state = "has another content"
    except OSError as error:
        state = str(error.strerror)
    return (
        f"--state-dir {spec.state_dir} is not the folder that the other managers have ({file.name}: {state}): mount the disk that "
        f"all nodes share on {host}"
    )

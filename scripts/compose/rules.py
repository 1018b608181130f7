"""What must hold for docker-compose.yml and the Dockerfile beyond their syntax. Checked without an engine."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from pydantic import BaseModel, ValidationError

from kvpool.cache_service.settings import ManagerSettings
from kvpool.worker_service.settings import WorkerSettings

from . import dockerfile
from .file import ComposeError, ComposeFile, Service, read
from .project import COMPOSE_FILE, DOCKERFILE

LOOPBACK = "127.0.0.1"
SPARE_SECONDS = 20
"""Between the end of a worker's grace and the engine's patience: it says Free and good-bye, and its process ends, which takes
seconds on a busy machine."""
SETTINGS: Mapping[str, type[BaseModel]] = {"KVPOOL_MANAGER_": ManagerSettings, "KVPOOL_WORKER_": WorkerSettings}
TRITON_CACHE = "TRITON_CACHE_DIR"
_PORT = re.compile(r"(?P<host>[\d.]+):(?P<published>\d+):(?P<target>\d+)")

Rule = Callable[[Service], Iterator[str]]


def is_no_root(service: Service) -> Iterator[str]:
    """By number, so that nothing of the image decides who that is."""
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", service.user or ""):
        yield f"runs as {service.user!r}: give user and group as numbers, and not 0"


def is_confined(service: Service) -> Iterator[str]:
    """A process that is taken over can neither change the image nor become more than it is."""
    if not service.read_only:
        yield "has a root file system that can be written: read_only: true, with a volume or tmpfs for what it writes"
    if service.cap_drop != ["ALL"]:
        yield f"drops the capabilities {service.cap_drop}: cap_drop: [ALL]"
    if "no-new-privileges:true" not in service.security_opt:
        yield 'may gain privileges: security_opt: ["no-new-privileges:true"]'
    if service.stays and (service.mem_limit is None or service.pids_limit is None):
        yield "may use up the machine: it needs mem_limit and pids_limit"


def has_a_tagged_image(service: Service) -> Iterator[str]:
    """`latest` is whatever was built or pulled last."""
    tag = service.image.rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest"):
        yield f"has the image {service.image!r}: give it a tag other than latest"


def is_never_pulled(service: Service) -> Iterator[str]:
    """A registry may hold another image of this name."""
    if service.build is None and service.pull_policy != "never":
        yield "is not built: it needs build, or pull_policy: never where another service builds its image"


def is_watched(service: Service) -> Iterator[str]:
    """Whoever stays has a health check that asks grpc.health.v1 on its own port, without a shell."""
    if not service.stays:
        return
    if service.healthcheck is None:
        yield "has no healthcheck"
        return
    command = service.healthcheck.test
    target = _port_inside(service)
    if command[:2] != ["CMD", "kvpool-health"] or f"{LOOPBACK}:{target}" not in command:
        yield f"has the health check {command}: [CMD, kvpool-health, {LOOPBACK}:{target}], the port that it listens on"


def listens_where_it_is_published(service: Service) -> Iterator[str]:
    """One port, on loopback; a worker tells clients the one that is open outside."""
    if not service.stays:
        if service.ports:
            yield "publishes ports, but is a command that ends"
        return
    matches = [_PORT.fullmatch(port) for port in service.ports]
    if len(matches) != 1 or matches[0] is None or matches[0]["host"] != LOOPBACK:
        yield f"publishes {service.ports}: one port, as {LOOPBACK}:OUTSIDE:INSIDE"
        return
    found = matches[0]
    if found["target"] != _port_inside(service):
        yield f"listens on {_port_inside(service)} but publishes {found['target']}"
    advertised = service.environment.get("KVPOOL_WORKER_ADVERTISE", f"{LOOPBACK}:{found['published']}")
    if advertised != f"{LOOPBACK}:{found['published']}":
        yield f"tells clients {advertised}, but is published on {found['host']}:{found['published']}"
    if service.network_mode is not None:
        yield f"has network_mode {service.network_mode}: it needs a network of its own"


def stops_gently(service: Service) -> Iterator[str]:
    """Signals arrive, and there is time for what they ask for."""
    if not service.init:
        yield "has no init process: init: true, or nobody passes signals on and collects orphans"
    if not _is_worker(service):
        return
    default = WorkerSettings.model_fields["grace_seconds"].default
    grace = float(service.environment.get("KVPOOL_WORKER_GRACE_SECONDS", default))
    if service.stop_grace_period < grace + SPARE_SECONDS:
        yield (
            f"gives its streams {grace:g} s but is killed after {service.stop_grace_period} s: "
            f"stop_grace_period must be at least {grace + SPARE_SECONDS:g}s"
        )


def waits_for_its_manager(service: Service) -> Iterator[str]:
    """Workers start when the manager serves."""
    dependency = service.depends_on.get("manager")
    if _is_worker(service) and (dependency is None or dependency.condition != "service_healthy"):
        yield "does not wait for the manager: depends_on: { manager: { condition: service_healthy } }"


def returns_after_a_crash_only(service: Service) -> Iterator[str]:
    """A drained worker ends with status 0 and must not be started again behind its operator's back."""
    if _is_worker(service) and service.restart != "on-failure":
        yield f"has restart: {service.restart}: on-failure, so that a drained worker stays away"


def says_settings_that_exist(service: Service) -> Iterator[str]:
    """A process ignores variables that it does not know, so a misspelt one would do nothing."""
    for variable in service.environment:
        for prefix, settings in SETTINGS.items():
            field = variable.removeprefix(prefix).lower()
            if variable.startswith(prefix) and field not in settings.model_fields:
                yield f"sets {variable}, which is no setting: there are {', '.join(sorted(settings.model_fields))}"


def has_one_gpu_or_none(service: Service) -> Iterator[str]:
    """One worker, one GPU; and only who asks for GPUs needs a machine with some."""
    num_gpus = [len(device.device_ids) for device in service.devices]
    if "gpu" in service.profiles:
        if num_gpus != [1] or service.devices[0].capabilities != ["gpu"]:
            yield "is in the profile gpu: it needs one device with one of device_ids and capabilities: [gpu]"
    elif num_gpus:
        yield "reserves a device: put it into the profile gpu"


RULES: tuple[Rule, ...] = (
    is_no_root,
    is_confined,
    has_a_tagged_image,
    is_never_pulled,
    is_watched,
    listens_where_it_is_published,
    stops_gently,
    waits_for_its_manager,
    returns_after_a_crash_only,
    says_settings_that_exist,
    has_one_gpu_or_none,
)


def _is_worker(service: Service) -> bool:
    return any(variable.startswith("KVPOOL_WORKER_") for variable in service.environment)


def _port_inside(service: Service) -> str:
    """The port that the process is told to listen on."""
    role = "WORKER" if _is_worker(service) else "MANAGER"
    return service.environment.get(f"KVPOOL_{role}_PORT", "nothing")


def compose_problems(file: ComposeFile) -> Iterator[str]:
    """What is wrong with the file, one line each."""
    for name, service in file.services.items():
        for rule in RULES:
            yield from (f"{name} {problem}" for problem in rule(service))
        for volume in service.volumes:
            source = volume.partition(":")[0]
            if source not in file.volumes:
                yield f"{name} mounts {source}: by default only volumes that the file declares are mounted"
    built = {service.image for service in file.services.values() if service.build is not None}
    for name, service in file.services.items():
        if service.image not in built:
            yield f"{name} runs {service.image}, which no service builds"
    yield from _twice(file, "the build of", lambda s: [s.image] if s.build is not None else [])
    yield from _twice(file, "the port", lambda s: [port.rpartition(":")[0] for port in s.ports])
    yield from _twice(file, "the GPU", lambda s: [gpu for device in s.devices for gpu in device.device_ids])
    yield from _twice(
        file, "the worker_id", lambda s: [s.environment.get("KVPOOL_WORKER_WORKER_ID", "?")][: _is_worker(s)]
    )


def _twice(file: ComposeFile, what: str, values_of: Callable[[Service], list[str]]) -> Iterator[str]:
    counts = Counter(value for service in file.services.values() for value in values_of(service))
    yield from (f"{what} {value} is given to {count} services" for value, count in counts.items() if count > 1)


def problems(compose_text: str, dockerfile_text: str) -> list[str]:
    """What is wrong with the two files, one line each."""
    try:
        file = read(compose_text)
    except ValidationError as error:
        return [f"docker-compose.yml: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    except ComposeError as error:
        return [f"docker-compose.yml: {error}"]
    builds = [(service.build.target, bool(service.devices)) for service in file.services.values() if service.build]
    targets = {target for target, _ in builds}
    compiling = {target for target, has_gpu in builds if has_gpu} - {
        target for target, has_gpu in builds if not has_gpu
    }
    return [
        *(f"docker-compose.yml: {problem}" for problem in compose_problems(file)),
        *(f"docker-compose.yml: {problem}" for problem in gpu_problems(file, dockerfile_text)),
        *(f"Dockerfile: {problem}" for problem in dockerfile.problems(dockerfile_text, targets, compiling)),
    ]


def gpu_problems(file: ComposeFile, dockerfile_text: str) -> Iterator[str]:
    """What a GPU's kernels are compiled with and kept in: both only where there is a GPU."""
    stage_of = {service.image: service.build.target for service in file.services.values() if service.build is not None}
    kinds: dict[str, set[bool]] = {}
    for name, service in file.services.items():
        target = stage_of.get(service.image)
        if target is None:
            continue
        kinds.setdefault(target, set()).add(bool(service.devices))
        stage = dockerfile.image(dockerfile_text, target)
        if not service.devices or stage is None:
            continue
        cache = {**dockerfile.environment(stage), **service.environment}.get(TRITON_CACHE, "the home folder")
        mounted = [volume.split(":")[1] for volume in service.volumes]
        if not any(cache.startswith(f"{folder}/") for folder in mounted):
            yield (
                f"{name} keeps compiled kernels in {cache}, where none may be executed: {TRITON_CACHE} in one of its volumes, "
                f"{', '.join(mounted) or 'of which it has none'}"
            )
    for target, found in kinds.items():
        if len(found) == 2:
            yield f"builds {target} for services with a GPU and for others: only those with a GPU need a compiler"


def check_files() -> int:
    """Check the repository's own files; returns the exit status."""
    found = problems(COMPOSE_FILE.read_text(), DOCKERFILE.read_text())
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"docker-compose.yml and Dockerfile: {f'{len(found)} problems' if found else 'every rule holds'}")
    return 1 if found else 0

"""docker-compose.yml without an engine: read, with every variable at its default, into a model of what we use of it.

What the model does not know is an error: a field that is misspelt, or that nobody has thought about.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?:(?P<operator>:?-)(?P<default>[^}]*))?\}|(?P<bare>\w+))")
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


class ComposeError(Exception):
    """The file cannot be read; the message says where and why."""


def _seconds(value: object) -> int:
    match = _DURATION.fullmatch(value) if isinstance(value, str) and value else None
    if match is None:
        raise ValueError("write a duration as 1h2m3s")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def _said(environment: object) -> object:
    return {k: v for k, v in environment.items() if v is not None} if isinstance(environment, dict) else environment


Seconds = Annotated[int, BeforeValidator(_seconds)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Build(_Strict):
    context: str
    target: str
    network: str
    args: dict[str, str] = {}


class Healthcheck(_Strict):
    test: list[str]
    interval: Seconds
    timeout: Seconds
    retries: int
    start_period: Seconds


class Logging(_Strict):
    driver: str
    options: dict[str, str]


class Dependency(_Strict):
    condition: str


class Device(_Strict):
    driver: str
    device_ids: list[str]
    capabilities: list[str]


class Reservations(_Strict):
    devices: list[Device]


class Resources(_Strict):
    reservations: Reservations


class Deploy(_Strict):
    resources: Resources


class Service(_Strict):
    image: str
    build: Build | None = None
    pull_policy: str | None = None
    entrypoint: list[str] | None = None
    environment: Annotated[dict[str, str], BeforeValidator(_said)] = {}
    """Without what is passed on as it is: `NAME:` and no value."""
    user: str | None = None
    init: bool = False
    read_only: bool = False
    cap_drop: list[str] = []
    security_opt: list[str] = []
    pids_limit: int | None = None
    mem_limit: str | None = None
    cpus: str | None = None
    logging: Logging | None = None
    tmpfs: list[str] = []
    volumes: list[str] = []
    ports: list[str] = []
    network_mode: str | None = None
    depends_on: dict[str, Dependency] = {}
    profiles: list[str] = []
    restart: str = "no"
    stop_grace_period: Seconds = 10
    healthcheck: Healthcheck | None = None
    deploy: Deploy | None = None

    @property
    def stays(self) -> bool:
        """Whether it is there to serve, and not a command that ends."""
        return self.restart != "no"

    @property
    def devices(self) -> list[Device]:
        """What is reserved for it beside CPU and memory."""
        return [] if self.deploy is None else self.deploy.resources.reservations.devices


class ComposeFile(_Strict):
    name: str
    services: Annotated[dict[str, Service], Field(min_length=1)]
    volumes: dict[str, None] = {}


def read(text: str) -> ComposeFile:
    """Raises ComposeError for what is no YAML, and pydantic's ValidationError, a ValueError, for what the model does not know."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ComposeError(f"not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ComposeError(f"needs services, has only {content!r}")
    # Fragments for use elsewhere in the file; compose ignores them too.
    content = {key: value for key, value in content.items() if not str(key).startswith("x-")}
    return ComposeFile.model_validate(_interpolated(content))


def _interpolated(value: Any) -> Any:
    match value:
        case dict():
            return {key: _interpolated(item) for key, item in value.items()}
        case list():
            return [_interpolated(item) for item in value]
        case str():
            return _VARIABLE.sub(_default, value)
        case _:
            return value


def _default(match: re.Match[str]) -> str:
    if match[0] == "$$":
        return "$"
    if match["operator"] is None:
        raise ComposeError(f"{match[0]} has no default: write ${{{match['name'] or match['bare']}:-default}}")
    return match["default"]

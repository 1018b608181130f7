"""Settings of the gateway's process: flags (`--port`), `KVPOOL_GATEWAY_*` variables, [gateway] of a TOML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, PrivateAttr, SecretStr, StringConstraints, field_validator, model_validator
from pydantic_settings import CliToggleFlag, NoDecode, SettingsConfigDict

from kvpool.client import ClientConfig, KvpoolError
from kvpool.process.address import DEFAULT_MANAGER, is_loopback
from kvpool.process.logs import LogFormat, LogLevel
from kvpool.process.settings import ProcessSettings

DEFAULT_PORT: Final = 8000
MAX_KEY_FILE_BYTES: Final = 1 << 20

Words = Annotated[list[str], NoDecode]
"""A list of words: from a flag that may be repeated, or from a variable with commas between the words or a JSON list."""


class GatewaySettings(ProcessSettings):
    """OpenAI's API and a live page in front of a cluster of kvpool.

    Each setting is also a variable, e.g. KVPOOL_GATEWAY_PORT=8000, and a line in section [gateway] of the file given with --config,
    e.g. port = 8000. Flags override variables, variables override the file.
    """

    model_config = SettingsConfigDict(env_prefix="KVPOOL_GATEWAY_", cli_prog_name="kvpool gateway")
    table: ClassVar[str] = "gateway"
    shared_variables: ClassVar[Mapping[str, str]] = {"manager": "KVPOOL_MANAGER"}

    manager: str = Field(
        default=DEFAULT_MANAGER,
        description="host:port of the cache manager; of several with commas between, or a name that several have; or file:PATH of "
        "a file that lists them.",
    )
    host: Annotated[str, StringConstraints(min_length=1)] = Field(
        default="127.0.0.1",
        description="Address to listen on. Anything but loopback needs --api-key, --api-key-file or --no-api-key. There is no "
        "encryption: put a proxy with TLS before it.",
    )
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="TCP port to listen on; 0: any free one.")
    api_key: Annotated[list[SecretStr], NoDecode] = Field(
        default=[],
        description="Key that callers must show (Authorization: Bearer KEY); may be repeated. A flag is visible to other users of "
        "this machine: prefer a file or the variable.",
    )
    api_key_file: Path | None = Field(default=None, description="File with such keys, one on each line.")
    no_api_key: CliToggleFlag[bool] = Field(
        default=False,
        description="Listen beyond loopback without any key: everybody who reaches the port may use the cluster.",
    )
    allowed_host: Words = Field(
        default=[],
        description="Further name under which this gateway is reached; may be repeated. Others are refused, so that a page of "
        "another site cannot reach it by its own name (DNS rebinding). IP addresses, localhost and --host are always allowed.",
    )
    cors_origin: Words = Field(
        default=[],
        description="Origin whose pages may call the API, e.g. https://chat.example; may be repeated; '*': any. Default: none.",
    )
    ignore_unknown_fields: CliToggleFlag[bool] = Field(
        default=False,
        description="Ignore fields of a request that kvpool does not have, and list them in the header X-Kvpool-Ignored. Default: "
        "refuse the request.",
    )
    kept_requests: int = Field(
        default=128,
        ge=0,
        le=10_000,
        description="Answers that have ended and are still listed on the page, each with why its prompt was not cached; 0: none, "
        "and the manager is not asked why.",
    )
    max_connections: int = Field(default=4096, ge=1, le=1 << 20, description="Connections at the same time.")
    max_streams: int = Field(
        default=1024, ge=1, le=1 << 20, description="Answers that are generated at the same time; more get 429."
    )
    max_body_bytes: int = Field(default=16 << 20, ge=1024, le=1 << 30, description="Bytes of a request's body.")
    max_n: int = Field(default=64, ge=1, le=128, description="Largest n: answers to one prompt.")
    max_prompts: int = Field(default=256, ge=1, le=1 << 16, description="Prompts of one request.")
    head_seconds: float = Field(
        default=10.0, gt=0, le=3600, description="Seconds that a request's head may take, from its first byte."
    )
    body_seconds: float = Field(default=60.0, gt=0, le=3600, description="Seconds that a request's body may take.")
    idle_seconds: float = Field(
        default=75.0, gt=0, le=86_400, description="Seconds after which a connection without a request is closed."
    )
    reader_seconds: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Seconds for which a reader may take nothing of its answer; then the connection is closed and the blocks "
        "are free.",
    )
    grace_seconds: float = Field(
        default=10.0, ge=0, le=3600, description="Seconds that running answers may take to end after SIGTERM."
    )
    timeout: float = Field(default=600.0, gt=0, le=86_400, description="Seconds from a request to its last token.")
    log_format: LogFormat = Field(default=LogFormat.console, description="Format of the log lines on stderr.")
    log_level: LogLevel = Field(default=LogLevel.info, description="Lowest level to log.")

    _file_keys: list[str] = PrivateAttr(default=[])

    @field_validator("api_key", "allowed_host", "cors_origin", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """Split a text into words. A repeated flag comes as one text too, with commas between its values."""
        if not isinstance(value, str):
            return value
        if not value.startswith("["):
            words = [word.strip() for word in value.split(",")]
            if "" in words:
                # E.g. of a variable that is not set: nobody must believe that there is a key.
                raise ValueError("a value is empty: give it, or leave the setting out")
            return words
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            # Never the value itself: it may be a key.
            raise ValueError('give one word, words with commas between them, or a JSON list: ["one", "two"]') from None

    @field_validator("manager")
    @classmethod
    def _manager_is_an_address(cls, manager: str) -> str:
        try:
            ClientConfig(manager=manager)
        except KvpoolError:
            raise ValueError("the manager's address must be host:port, e.g. 127.0.0.1:50051") from None
        return manager

    @field_validator("api_key")
    @classmethod
    def _keys_are_words(cls, keys: list[SecretStr]) -> list[SecretStr]:
        for key in keys:
            _require_key(key.get_secret_value(), "")
        return keys

    @model_validator(mode="after")
    def _beyond_loopback_only_with_a_key(self) -> Self:
        if self.api_key_file is not None:
            self._file_keys = _read_keys(self.api_key_file)
        if self.no_api_key and self.keys:
            raise ValueError("--no-api-key and a key contradict each other: give one of them")
        if not is_loopback(self.host) and not self.keys and not self.no_api_key:
            raise ValueError(
                f"--host {self.host} can be reached from other machines: give --api-key or --api-key-file, or --no-api-key if "
                "everybody who reaches it may use the cluster"
            )
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, each once."""
        given = [key.get_secret_value() for key in self.api_key]
        return tuple(dict.fromkeys([*given, *self._file_keys]))


def _read_keys(path: Path) -> list[str]:
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(MAX_KEY_FILE_BYTES + 1)
        if len(content) > MAX_KEY_FILE_BYTES:
            raise ValueError(
                f"--api-key-file {path} has more than {MAX_KEY_FILE_BYTES} bytes: give a file of keys, one on each line"
            )
        keys = [line for line in content.decode().splitlines() if line.strip() and not line.startswith("#")]
    except OSError as error:
        raise ValueError(f"--api-key-file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--api-key-file {path} is not text") from None
    if not keys:
        raise ValueError(f"--api-key-file {path} has no key: write one on each line")
    for key in keys:
        _require_key(key, f"--api-key-file {path}: ")
    return keys


def _require_key(key: str, place: str) -> None:
    if not 8 <= len(key) <= 512 or not key.isascii() or not key.isprintable() or " " in key or "," in key:
        # Never the key itself: the message goes to a terminal or a log.
        raise ValueError(f"{place}a key has 8 to 512 printable ASCII characters, without spaces and commas")

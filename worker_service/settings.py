"""What a worker's process can be told: flags (`--num-blocks`), `KVPOOL_WORKER_*` variables, defaults. In that order."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, StringConstraints, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "KVPOOL_WORKER_"

Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]


def _default_manager() -> str:
    return os.environ.get("KVPOOL_MANAGER") or "127.0.0.1:50051"


class WorkerSettings(BaseSettings):
    """A worker of kvpool: holds a model and its KV tensors, and generates text out of blocks that the cache manager grants."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="python -m kvpool.worker_service",
        cli_hide_none_type=True,
        protected_namespaces=(),
    )

    manager: Name = Field(
        default_factory=_default_manager,
        description="host:port of the cache manager. Default: $KVPOOL_MANAGER, else 127.0.0.1:50051.",
    )
    worker_id: Name | None = Field(
        None,
        description="Name of this worker, unique in the cluster, the same over restarts. Default: host name and port.",
    )
    host: Annotated[str, StringConstraints(min_length=1)] = Field(
        "127.0.0.1",
        description="Address to listen on. There is neither encryption nor authentication: "
        "anything but loopback needs a network you trust.",
    )
    port: int = Field(0, ge=0, le=65535, description="TCP port to listen on; 0 takes any free one.")
    advertise: Name | None = Field(
        None, description="host:port under which clients reach this worker. Default: the address it listens on."
    )
    model: str = Field(
        "smollm2", min_length=1, description="A model folder (config.json and safetensors, or a GGUF file), or smollm2."
    )
    device: str = Field(
        "auto", description="auto (the first CUDA device if there is one, else the CPU), cpu, or cuda:N."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Of weights and KV. auto: on a CPU bfloat16 where it computes it natively, else float32; on CUDA the model's.",
    )
    block_size: int = Field(16, ge=1, le=65536, description="Token slots of one block: a power of two.")
    num_blocks: int | None = Field(None, ge=2, description="Blocks of the KV cache, with the null block 0.")
    kv_cache_memory: ByteSize | None = Field(
        None,
        description="Size of the KV cache, e.g. 2GiB. Default, without --num-blocks too: a share of the free memory.",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Largest sequence in tokens, prompt and generated together. Default: the model's own."
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Sequences in one batch.")
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Tokens forwarded in one step at most; a longer prompt is computed in chunks."
    )
    max_num_waiting: int = Field(1024, ge=1, le=1 << 20, description="Requests that may wait; more are refused.")
    prefix_caching: bool = Field(True, description="Whether prompts may be served from the cache.")
    report_seconds: float = Field(
        0.05, ge=0, le=10, description="Filled blocks are reported at most so many seconds late."
    )
    reserve_seconds: float = Field(
        2.0,
        ge=0,
        le=3600,
        description="Seconds of decoding that the reserve of blocks should last without the manager.",
    )
    grace_seconds: float = Field(5.0, ge=0, le=3600, description="Seconds that running streams get to end on SIGTERM.")
    cache_dir: Path | None = Field(
        None,
        description="Where converted models are kept. Default: $KVPOOL_CACHE_DIR, else the user's cache folder / kvpool.",
    )
    log_format: Literal["console", "json"] = Field("console", description="Format of the log lines on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe lines to log.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}), or decoding alone could use up every step; raise the one or lower the other"
            )
        if self.block_size & (self.block_size - 1):
            below = 1 << self.block_size.bit_length() - 1
            raise ValueError(f"--block-size must be a power of two, got {self.block_size}: take {below} or {2 * below}")
        if self.host in ("0.0.0.0", "::", "[::]") and self.advertise is None:
            raise ValueError(
                f"listening on {self.host} needs --advertise: host:port under which clients reach this worker"
            )
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the worker."""
        host = self.host.strip("[]")
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def address(self, port: int) -> str:
        """host:port as gRPC writes it, IPv6 hosts in brackets."""
        host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
        return f"{host}:{port}"

    def name(self, port: int) -> str:
        """The worker's name, made up from host and port if none was given."""
        return self.worker_id or f"{socket.gethostname()}-{port}"

"""Settings of a worker's process: flags (`--num-blocks`), `KVPOOL_WORKER_*` variables, [worker] of a TOML file."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import quote

from pydantic import ByteSize, Field, StringConstraints, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from kvpool.process.address import DEFAULT_MANAGER, EVERY_ADDRESS, join_host_port, require_managers, with_default_port
from kvpool.process.logs import LogFormat, LogLevel
from kvpool.process.server_settings import ServerSettings
from kvpool.process.settings import state_home

from .engine.policy import SchedulingPolicy
from .model.settings import MemorySettings, ModelSettings, QuantizationName, RuntimeName

_MAX_FILE_NAME: Final = 200
"""Bytes of one path component; file systems allow 255."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class WorkerSettings(ServerSettings):
    """A worker of kvpool: holds a model and its KV tensors, and generates text in blocks that the cache manager grants.

    Each setting is also a variable, e.g. KVPOOL_WORKER_NUM_BLOCKS=4096, and a line in the [worker] table of the --config file,
    e.g. num_blocks = 4096. Flags override variables, variables override the file.
    """

    model_config = SettingsConfigDict(env_prefix="KVPOOL_WORKER_", cli_prog_name="kvpool worker")
    table: ClassVar[str] = "worker"
    shared_variables: ClassVar[Mapping[str, str]] = {"manager": "KVPOOL_MANAGER", "cache_dir": "KVPOOL_CACHE_DIR"}

    manager: Name = Field(
        DEFAULT_MANAGER,
        description="host:port of the cache manager; of several with commas between, or a name that several have: then the one "
        "that leads; or file:PATH of a file that lists them. Also $KVPOOL_MANAGER.",
    )
    worker_id: Name | None = Field(
        None,
        description="Name of this worker: unique in the cluster, the same after a restart. Default: host name and port.",
    )
    host: Annotated[str, StringConstraints(min_length=1)] = Field(
        "127.0.0.1",
        description="Address to listen on. There is no encryption or authentication: "
        "use other addresses than loopback only in a trusted network.",
    )
    port: int = Field(0, ge=0, le=65535, description="TCP port to listen on; 0: any free one.")
    advertise: Name | None = Field(
        None,
        description="host or host:port at which clients reach this worker. Default: those it listens on.",
    )
    model: str = Field(
        "smollm2",
        min_length=1,
        description="A model folder (config.json and safetensors, or a GGUF file), smollm2, or a model on the hub, "
        "e.g. Qwen/Qwen3-0.6B, which is downloaded once.",
    )
    device: str = Field(
        "auto",
        description="auto (the first CUDA device if there is one, else the CPU), cpu, cuda (the first) or cuda:N.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of weights and KV. auto: on CUDA the model's; on a CPU bfloat16 if the CPU computes it natively, "
        "else float32.",
    )
    block_size: int = Field(16, ge=1, le=65536, description="Token slots of one block: a power of two.")
    num_blocks: int | None = Field(
        None,
        ge=2,
        description="Blocks of the KV cache, the null block 0 included. Default: as many as fit into --kv-cache-memory.",
    )
    kv_cache_memory: ByteSize | None = Field(
        None,
        description="Size of the KV cache, e.g. 2GiB. Default: a share of the free memory, if --num-blocks is not given.",
    )
    window_blocks: int | None = Field(
        None,
        ge=2,
        description="For models with sliding windows: blocks of each group of layers with one, the null block 0 included. Default: "
        "for each of --max-num-seqs sequences a ring and two windows, but at most half of the KV cache.",
    )
    state_blocks: int | None = Field(
        None,
        ge=2,
        description="For models with recurrent layers: blocks of their states, the null block 0 included. Default: for each of "
        "--max-num-seqs sequences two, and two that are kept for others, but at most half of the KV cache.",
    )
    cross_blocks: int | None = Field(
        None,
        ge=2,
        description="For encoder-decoder models: blocks for the KV of encoders' outputs, the null block 0 included. Default: "
        "for each of --max-num-seqs sequences the longest input, but at most half of the KV cache.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the GPU's memory to use, other processes included, if the size of the KV cache is not given. On a "
        "CPU the KV cache takes a fifth of the free memory.",
    )
    attention_backend: Literal["auto", "torch", "varlen", "flash"] = Field(
        "auto",
        description="Attention kernel over KV blocks. flash: of the package flash-attn; varlen: torch's, with FlashAttention 3 or "
        "4; torch: plain torch, on every device. auto: the first of these that passes a self-test on the model's shapes.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Largest sequence in tokens, prompt and generated together. Default: the model's own; with longrope, "
        "the length up to which texts equal those of transformers.",
    )
    max_encoder_tokens: int | None = Field(
        None,
        ge=1,
        description="Largest prompt in tokens of an encoder-decoder model, whose encoder it feeds; --max-model-len then counts the "
        "decoder's tokens. Default: the model's own.",
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Sequences in one batch.")
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Tokens in one step; a longer prompt is computed in chunks."
    )
    max_mixed_prefill_tokens: int = Field(
        512,
        ge=1,
        description="Prompt tokens in one step while other sequences decode. Smaller: more even decoding; larger: first tokens "
        "sooner.",
    )
    runtime: RuntimeName = Field(
        "auto",
        description="What computes a step on a CPU. native: C of our own, if it was built, for the models that it "
        "recognises; torch: transformers' modules; auto: native if it computes what they do, else torch. If only torch uses the "
        "CPU's matrix unit, auto is the faster of the two: the first start times both.",
    )
    quantize: QuantizationName = Field(
        "none",
        description="Weights of the native step. int8: one byte for each number, half of bfloat16's: faster, and texts differ a "
        "little from those of the model. KV keeps the --dtype.",
    )
    model_nice: int = Field(
        5,
        ge=0,
        le=19,
        description="On a CPU, the nice(1) value of the forward pass, so that RPCs and other processes get the CPU first.",
    )
    scheduling_policy: SchedulingPolicy = Field(
        SchedulingPolicy.fcfs,
        description="fcfs: first come, first served. priority: by the requests' priority, smaller first. Both share fairly between "
        "the requests' tenants.",
    )
    max_num_waiting: int = Field(1024, ge=1, le=1 << 20, description="Waiting requests; more are refused.")
    max_num_waiting_tokens: int = Field(
        1 << 22, ge=1, description="Prompt tokens of all waiting requests; more are refused, but one may always wait."
    )
    prefix_caching: bool = Field(True, description="Whether prompts may be served from the cache.")
    retention_interval: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="For models with sliding windows: keep the windows after every so many tokens of a text, so that other prompts "
        "can go on from there. 0: only where prompts end or part.",
    )
    report_seconds: float = Field(
        0.1, ge=0, le=10, description="Longest time in seconds until a filled block is reported."
    )
    reserve_seconds: float = Field(
        2.0,
        ge=0,
        le=3600,
        description="Seconds of decoding that the reserve of blocks should last without the manager.",
    )
    grace_seconds: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="Seconds that running requests have to end after SIGTERM, or when the worker is drained.",
    )
    reader_seconds: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="Seconds that a message of Generate or GenerateMany may wait for its reader; then its requests end and their "
        "blocks are freed. Time without a message does not count. 0: no limit.",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port of /metrics for Prometheus; 0: any free one, which is logged. Default: none.",
    )
    metrics_host: Annotated[str, StringConstraints(min_length=1)] = Field(
        "127.0.0.1", description="Address for /metrics; --host does not change it."
    )
    state_dir: Path | None = Field(
        None,
        description="Folder for the worker's incarnation, which outlives the process; for one worker. Default: "
        "kvpool/workers/MANAGER/ID in $XDG_STATE_HOME or ~/.local/state; none for a worker without a name on a free port.",
    )
    dry_run: bool = Field(
        False,
        description="Print the model's needs, the device's memory and the size of the KV cache, and exit. Reads the model's "
        "config, not its weights.",
    )
    cache_dir: Path | None = Field(
        None,
        description="Folder for converted models. Default: $KVPOOL_CACHE_DIR, else kvpool in the user's cache folder.",
    )
    log_format: LogFormat = Field(LogFormat.console, description="Format of the log lines on stderr.")
    log_level: LogLevel = Field(LogLevel.info, description="Least severe lines to log.")

    @field_validator("manager")
    @classmethod
    def _manager_is_an_address(cls, manager: str) -> str:
        require_managers(manager)
        return manager

    @field_validator("advertise")
    @classmethod
    def _advertise_is_an_address(cls, advertise: str | None) -> str | None:
        if advertise is not None:
            with_default_port(advertise, 1)
        return advertise

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}), or decodes alone could exceed a step; raise the one or lower the other"
            )
        if self.block_size & (self.block_size - 1):
            below = 1 << self.block_size.bit_length() - 1
            raise ValueError(f"--block-size must be a power of two, got {self.block_size}: use {below} or {2 * below}")
        if self.quantize != "none" and self.model_settings().runtime == "torch":
            given = "--runtime torch" if self.runtime == "torch" else "--attention-backend, which is for torch,"
            raise ValueError(f"--quantize {self.quantize} is for the native step: leave {given} out, or --quantize")
        if self.host in EVERY_ADDRESS and self.advertise is None:
            raise ValueError(
                f"listening on {self.host} needs --advertise: the host, or host:port, at which clients reach this worker"
            )
        return self

    def model_settings(self) -> ModelSettings:
        values = self._values_of(ModelSettings)
        if self.runtime == "auto" and self.attention_backend != "auto":
            values["runtime"] = "torch"  # a backend is one for torch's modules
        return ModelSettings(**values)

    def memory_settings(self) -> MemorySettings:
        return MemorySettings(**self._values_of(MemorySettings))

    def _values_of(self, record: type[ModelSettings | MemorySettings]) -> dict[str, Any]:
        """The settings that the record has too, by name."""
        return self.model_dump(include={field.name for field in fields(record)})

    def advertised(self, port: int) -> str:
        """host:port for clients."""
        return with_default_port(self.advertise, port) if self.advertise else join_host_port(self.host, port)

    def state_folder(self, port: int) -> Path | None:
        """--state-dir, or the default for the manager and the worker's name; None if the name changes with every start."""
        if self.state_dir is not None:
            return self.state_dir
        if self.worker_id is None and not self.port:
            return None
        return state_home() / "workers" / _file_name(self.manager) / _file_name(self.name(port))

    def name(self, port: int) -> str:
        """The worker's name; host name and port if none was given."""
        return self.worker_id or f"{socket.gethostname()}-{port}"


def _file_name(name: str) -> str:
    """A name as one path component; injective."""
    quoted = quote(name, safe="@:+,=")
    if set(name) == {"."}:
        quoted = quoted.replace(".", "%2E")
    if len(quoted) <= _MAX_FILE_NAME:
        return quoted
    return f"{quoted[: _MAX_FILE_NAME - 33]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"

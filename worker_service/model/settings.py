"""Settings of load_model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
RuntimeName = Literal["auto", "native", "torch"]
QuantizationName = Literal["none", "int8"]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    model: str
    """A folder with config.json and safetensors, a folder with one GGUF file, a GGUF file, `smollm2`, or a hub id."""
    dtype: DTypeName = "auto"
    """Type of weights and KV. auto: on CUDA the model's own; on a CPU bfloat16 if the CPU computes it natively, else float32."""
    device: str = "auto"
    """auto (the first CUDA device if there is one, else the CPU), cpu, cuda, or cuda:N."""
    max_model_len: int | None = None
    """Prompt and generated tokens together, with an encoder those of the decoder; None: the limit of the model's config."""
    cache_dir: Path | None = None
    """Folder of converted models and digests; None: $KVPOOL_CACHE_DIR, else kvpool in the user's cache folder."""
    runtime: RuntimeName = "auto"
    """native: the step in C, on a CPU; torch: transformers' modules; auto: native for the models that it computes, unless torch is
    faster here, else torch."""
    quantize: QuantizationName = "none"
    """int8: weights in one byte, natively only."""
    block_size: int = 16
    """Tokens of a block of the KV cache: the native step needs an even number in bfloat16."""
    max_num_batched_tokens: int = 2048
    """Tokens of a step, and sequences of one: `auto` compares runtimes within these limits."""
    max_num_seqs: int = 64
    max_encoder_tokens: int | None = None
    """Tokens of an encoder-decoder model's prompt, which feeds the encoder; None: the limit of the model's config."""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Settings of plan_memory."""

    block_size: int
    """Tokens per block: a power of two."""
    num_blocks: int | None = None
    """Blocks of the KV cache, the null block included. Overrides shares."""
    kv_cache_memory: int | None = None
    """Bytes of the KV cache. Overrides shares; not together with num_blocks."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for all its processes together, this worker included."""
    window_blocks: int | None = None
    """Blocks of each group with a window, the null block included; None: computed."""
    state_blocks: int | None = None
    """Blocks of the group of recurrent layers, the null block included; None: computed."""
    cross_blocks: int | None = None
    """Blocks for the KV of encoders' outputs, the null block included; None: computed."""
    max_num_seqs: int = 64
    """Sequences of a maximum batch."""
    max_num_batched_tokens: int = 2048
    """Tokens of a maximum batch."""

    @property
    def is_explicit(self) -> bool:
        """Whether the size of the KV cache is given, and not a share of the memory."""
        return self.num_blocks is not None or self.kv_cache_memory is not None

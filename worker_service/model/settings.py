"""How a model is to be loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Everything that load_model needs to know."""

    model: str
    """A folder with config.json and safetensors, a folder with one GGUF file, a GGUF file, `smollm2`, or a hub id."""
    dtype: DTypeName = "auto"
    """Of weights and KV. auto on a CPU: bfloat16 where the CPU computes it natively, else float32; on CUDA the model's own."""
    device: str = "auto"
    """auto (the first CUDA device if there is one, else the CPU), cpu, cuda, or cuda:N."""
    max_model_len: int | None = None
    """Prompt and generated tokens together; None: as many as the model's config allows."""
    cache_dir: Path | None = None
    """Where converted models and digests are kept; None: $KVPOOL_CACHE_DIR, else the user's cache folder / kvpool."""
    num_threads: int | None = None
    """CPU threads of this process for tensor work; None: torch's choice, all cores. Workers that share a machine must share
    its cores out: threads of two processes that wait for each other's cores slow both down many times over."""

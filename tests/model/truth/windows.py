"""Models with windows, whose layers have blocks of their own, which leave with the window."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvpool.worker_service.attention.flash import flash_kernel
from kvpool.worker_service.attention.layer import AttentionBackend
from kvpool.worker_service.attention.paged import PagedAttention
from kvpool.worker_service.attention.torch_backend import FREE_SHAPES, TorchAttention
from kvpool.worker_service.attention.varlen import varlen_kernel
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.step import SampledToken
from tests.attention import paged_reference
from tests.model.paged import SHORT_SEGMENTS
from tests.model.ring_cache import RingCache
from tests.model.truth.subject import NUM_NEW, Models, Subject, Truth, Way
from tests.tiny_models import COMMON, VOCAB_SIZE, WINDOW, draw_weights, make_tiny_model

LONG = 400
"""More than a partition of keys, several windows, and many blocks."""
TEXT = random.Random(5).choices(range(VOCAB_SIZE), k=LONG)
_SMALL = COMMON | {"num_hidden_layers": 5, "head_dim": 16, "query_pre_attn_scalar": 16}
_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def prompts() -> list[list[int]]:
    """Shorter than a window, and many times longer; the last begins like the one before it."""
    return [TEXT[:3], TEXT[40:59], TEXT[100:171], [*TEXT[100:140], *TEXT[10:50]]]


def make_gemma3(folder: Path, window: int, **fields: Any) -> Path:
    config = AutoConfig.for_model("gemma3_text", **_SMALL, sliding_window=window, layer_types=_LAYERS, **fields)
    return save(config, folder, seed=1)


def save(config: Any, folder: Path, seed: int) -> Path:
    """With random weights; seeds were chosen by hand for texts that vary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        draw_weights(model, None)
    model.save_pretrained(folder)
    return folder


def make_gemma3n(folder: Path, window: int) -> Path:
    """Its last two layers read the KV of the last ones before them of their kind."""
    fields = {name: value for name, value in _SMALL.items() if name != "query_pre_attn_scalar"}
    config = AutoConfig.for_model(
        "gemma3n_text",
        **fields,
        sliding_window=window,
        layer_types=_LAYERS,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 5,
    )
    return save(config, folder, seed=2)


BACKENDS = {
    "gemma3": ("native", "short", "free", "varlen", "flash"),
    "gemma2": ("native", "short"),
    "mistral": ("native", "short"),
    "gpt_oss": ("short",),
    "gemma3n_text": ("torch",),
}
"""In turn: windows in some layers, softcaps, windows in all layers, sinks, and layers that read the KV of others, of which no
backend knows."""
_MADE_HERE = {"gemma3": make_gemma3, "gemma3n_text": make_gemma3n}


@dataclass
class Windows(Subject):
    """A tiny model over a pool for each window. Blocks that left a window come back where a stale read would hurt. Half of the
    texts have holes in their tables there; a long one of each half is among them."""

    loaded: LoadedModel
    backend: str
    prompts: Sequence[Sequence[int]]
    truths: list[Truth]

    def compute(self, way: Way) -> list[list[SampledToken]]:
        cache = RingCache(self.loaded, backend=self._backend())
        if self.backend == "native":
            cache.forbid_the_null_block()
        try:
            texts = cache.generate(self.prompts, NUM_NEW, way)
            assert cache.num_turned > 4, "no ring turned"
            return texts
        finally:
            cache.runner.close()

    def _backend(self) -> AttentionBackend | None:
        dtype = self.loaded.runtime.dtype
        return {
            "native": None,
            "torch": None,
            "short": TorchAttention(dtype, 1, SHORT_SEGMENTS),
            "free": TorchAttention(dtype, 1, FREE_SHAPES),
            "varlen": PagedAttention(partial(varlen_kernel, paged_reference.varlen_attn)),
            "flash": PagedAttention(partial(flash_kernel, paged_reference.flash_attn_varlen_func)),
        }[self.backend]


def save_model(architecture: str, folder: Path) -> list[list[int]]:
    """Returns prompts for it."""
    if architecture in _MADE_HERE:
        _MADE_HERE[architecture](folder, WINDOW)
        return prompts()
    return [list(prompt) for prompt in make_tiny_model(architecture, folder).prompts]


def make(architecture: str, backend: str, models: Models) -> Windows:
    """`backend`: a key of Windows._backend."""
    made = models.made(architecture, lambda folder: save_model(architecture, folder))
    loaded = models.loaded(architecture, runtime="native" if backend == "native" else "torch")
    return Windows(loaded, backend, made.prompts, made.truths)


def subjects() -> Iterator[Any]:
    """Every architecture with the backends that compute its windows in a way of their own."""
    for architecture, backends in BACKENDS.items():
        for backend in backends:
            marks = [pytest.mark.native] if backend == "native" else []
            yield pytest.param((make, architecture, backend), id=f"{architecture}-{backend}", marks=marks)

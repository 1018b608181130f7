"""Layers with a window have blocks of their own, which leave with the window: the text is that of transformers' generate."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvpool.worker_service.attention.backend import AttentionBackend
from kvpool.worker_service.attention.flash import FlashKernel
from kvpool.worker_service.attention.invariance import FIXED_SHAPES
from kvpool.worker_service.attention.paged import PagedAttention
from kvpool.worker_service.attention.torch_backend import FREE_SHAPES, TorchAttention
from kvpool.worker_service.attention.varlen import VarlenKernel
from kvpool.worker_service.model.forward.kv_groups import groups_of
from kvpool.worker_service.model.forward.native import NativeRuntime
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.model.memory.facts import kv_bytes_per_token
from kvpool.worker_service.model.memory.meta_model import build_meta_model
from kvpool.worker_service.model.memory.plan import MemorySettings
from kvpool.worker_service.model.settings import DTypeName, RuntimeName
from tests.attention import paged_reference
from tests.model.paged import NEEDS_PACKING, NEVER, SHORT_SEGMENTS, load
from tests.model.ring_cache import Form, RingCache
from tests.model.test_native import open_model
from tests.tiny_models import MIN_MARGIN, VOCAB_SIZE, WINDOW, Oracle, make_tiny_model

NUM_NEW = 16
LONG = 400
"""More than a partition of keys, several windows, and many blocks."""
TEXT = random.Random(5).choices(range(VOCAB_SIZE), k=LONG)
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
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
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape) * 0.2
                parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
    model.save_pretrained(folder)
    return folder


class Subject(NamedTuple):
    loaded: LoadedModel
    backend: str
    prompts: list[list[int]]
    truth: list[list[int]]

    def cache(self, form: Form, **options: Any) -> RingCache:
        cache = RingCache(self.loaded, form, self._backend(), **options)
        if self.backend == "native":
            cache.forbid_the_null_block()
        return cache

    def _backend(self) -> AttentionBackend | None:
        dtype = self.loaded.dtype
        return {
            "native": None,
            "torch": None,
            "short": TorchAttention(dtype, NEVER, SHORT_SEGMENTS),
            "shared": TorchAttention(dtype, 1, FIXED_SHAPES[0]),
            "free": TorchAttention(dtype, 1, FREE_SHAPES),
            "varlen": PagedAttention(VarlenKernel(paged_reference.varlen_attn)),
            "flash": PagedAttention(FlashKernel(paged_reference.flash_attn_varlen_func)),
        }[self.backend]


_BACKENDS = {
    "gemma3": ("native", "torch", "short", "shared", "free", "varlen", "flash"),
    "gemma2": ("native", "short", "flash"),
    "mistral": ("native", "torch", "short", "varlen"),
    "gpt_oss": ("torch", "short", "free"),
    "gemma3n_text": ("torch", "short"),
}


def _subjects() -> Iterator[Any]:
    for architecture, backends in _BACKENDS.items():
        for backend in backends:
            marks = [pytest.mark.compiler] if backend == "native" else []
            yield pytest.param((architecture, backend), id=f"{architecture}-{backend}", marks=marks)


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


_MADE_HERE = {"gemma3": make_gemma3, "gemma3n_text": make_gemma3n}


@pytest.fixture(scope="module", params=_subjects())
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    architecture, backend = request.param
    path, texts = tmp_path_factory.mktemp(architecture), prompts()
    if architecture in _MADE_HERE:
        _MADE_HERE[architecture](path, WINDOW)
    else:
        texts = [list(prompt) for prompt in make_tiny_model(architecture, path).prompts]
    loaded = load(path, runtime="native" if backend == "native" else "torch")
    oracle = Oracle.of(path)
    for text in texts:
        assert oracle.margin(tuple(text), NUM_NEW) > MIN_MARGIN, "this text proves nothing"
    return Subject(loaded, backend, texts, [oracle.logits(tuple(text), NUM_NEW)[0] for text in texts])


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize(("chunk", "stagger"), [(NEVER, 0), (7, 0), (16, 2), (1, 1)])
def test_the_text_is_that_of_generate(subject: Subject, form: Form, chunk: int, stagger: int) -> None:
    """At once, in chunks of less and of more than a window, and packed with others that decode meanwhile."""
    cache = subject.cache(form)
    try:
        assert cache.generate(subject.prompts, NUM_NEW, chunk, stagger) == subject.truth
        assert cache.num_turned > 4, "no ring turned"
    finally:
        cache.runner.close()


def test_the_groups_are_those_of_the_layers(subject: Subject) -> None:
    groups = groups_of(subject.loaded.layers)
    windows = [group.window for group in groups]
    kept = [layer for layer in subject.loaded.layers if layer.source is None]
    assert windows == ([WINDOW] if all(layer.window for layer in kept) else [None, WINDOW])
    for group in groups:
        assert all(subject.loaded.layers[index].window == group.window for index in group.layers)
    assert sorted(index for group in groups for index in group.layers) == [
        index for index, layer in enumerate(subject.loaded.layers) if layer.source is None
    ]


class Bits(NamedTuple):
    """How a text is computed again."""

    form: Form
    block_size: int
    cuts: list[int]
    others: list[list[int]]


def ways() -> Iterator[Bits]:
    """In chunks and decodes, alone and with others, with blocks of fewer keys than a vector, and of more."""
    dice = random.Random(9)
    for block_size in (4, 16, 32):
        for form in Form:
            for cuts in (range(1, 64), [300, *range(350, 360)], sorted(dice.sample(range(1, LONG), 9))):
                others = [dice.choices(range(VOCAB_SIZE), k=dice.randrange(1, LONG)) for _ in range(dice.randrange(4))]
                yield Bits(form, block_size, list(cuts), others)


@pytest.mark.parametrize(
    ("runtime", "dtype"),
    [
        pytest.param("native", "float32", marks=pytest.mark.compiler),
        pytest.param("native", "bfloat16", marks=pytest.mark.compiler),
        pytest.param("torch", "float32", marks=NEEDS_PACKING),
    ],
)
@pytest.mark.parametrize("window", [100, 270])
def test_a_text_has_the_same_bits_with_and_without_the_blocks_before_its_window(
    runtime: RuntimeName, dtype: DTypeName, window: int, tmp_path: Path
) -> None:
    """Windows begin inside a partition of 256 keys, at its first key, and before it."""
    loaded = open_model(make_gemma3(tmp_path, window), dtype, runtime)
    whole = RingCache(loaded, by_window=False)
    expected = whole.logits(TEXT, [])
    whole.runner.close()
    assert expected.isfinite().all()
    num_turned = 0
    for way in ways():
        cache = RingCache(loaded, way.form, num_blocks=1200 // way.block_size + 400, block_size=way.block_size)
        if runtime == "native":
            cache.forbid_the_null_block()
        found = cache.logits(TEXT, way.cuts, way.others)
        cache.runner.close()
        num_turned += cache.num_turned
        assert torch.equal(found, expected), way
    assert num_turned > 20


@pytest.mark.compiler
def test_native_threads_share_a_long_window(tmp_path: Path) -> None:
    """Few decodes are split into partitions among threads, and those before the window are left out."""
    loaded = open_model(make_gemma3(tmp_path, 100), "float32", "native")
    assert isinstance(loaded.runtime, NativeRuntime)
    several = dataclasses.replace(loaded, runtime=dataclasses.replace(loaded.runtime, num_threads=3))
    expected = RingCache(loaded, by_window=False).logits(TEXT, [])
    for form in Form:
        cache = RingCache(several, form)
        cache.forbid_the_null_block()
        assert torch.equal(cache.logits(TEXT, [300, 396, 397, 398], [TEXT[:290]]), expected)
        cache.runner.close()


def test_a_plan_by_window_gives_each_group_its_blocks(tmp_path: Path) -> None:
    loaded = load(make_gemma3(tmp_path, WINDOW))
    settings = MemorySettings(block_size=16, num_blocks=50)
    plan = loaded.plan(settings).kv_cache
    assert [(group.window, group.num_blocks) for group in plan.groups] == [(None, 50), (WINDOW, 50)]
    # Two layers of five have full attention.
    each = kv_bytes_per_token(loaded.layers, loaded.dtype) // 5
    assert [group.bytes_per_token for group in plan.groups] == [2 * each, 3 * each]


def test_layers_that_read_the_kv_of_others_are_found_by_what_they_are_called_with(tmp_path: Path) -> None:
    """Also without weights, so that the memory is planned for what is stored."""
    loaded = load(make_gemma3n(tmp_path, WINDOW))
    sources = [None, None, None, 1, 2]
    assert [layer.source for layer in loaded.layers] == sources
    meta = build_meta_model(AutoConfig.from_pretrained(tmp_path))
    assert [layer.source for layer in meta.layers] == sources
    assert kv_bytes_per_token(loaded.layers, torch.float32) == 3 * 2 * (16 + 16) * 4

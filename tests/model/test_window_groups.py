"""Layers with a window have blocks of their own, which leave with the window. test_truth.py has the texts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig

from kvpool.worker_service.model.forward.layers import groups_of
from kvpool.worker_service.model.forward.native import NativeRuntime
from kvpool.worker_service.model.memory.facts import kv_bytes_per_token
from kvpool.worker_service.model.memory.meta_model import build_meta_model
from kvpool.worker_service.model.memory.plan import MemorySettings
from kvpool.worker_service.model.settings import DTypeName, RuntimeName
from tests.model.paged import NEEDS_PACKING, load
from tests.model.ring_cache import Form, RingCache
from tests.model.test_native import open_model
from tests.model.truth.windows import BACKENDS, LONG, TEXT, make_gemma3, make_gemma3n, save_model
from tests.tiny_models import VOCAB_SIZE, WINDOW


@pytest.mark.parametrize("architecture", BACKENDS)
def test_the_groups_are_those_of_the_layers(architecture: str, tmp_path: Path) -> None:
    save_model(architecture, tmp_path)
    layers = load(tmp_path).layers
    groups = groups_of(layers)
    windows = [group.window for group in groups]
    kept = [layer for layer in layers if layer.source is None]
    assert windows == ([WINDOW] if all(layer.needs.window for layer in kept) else [None, WINDOW])
    for group in groups:
        assert all(layers[index].needs.window == group.window for index in group.layers)
    assert sorted(index for group in groups for index in group.layers) == [
        index for index, layer in enumerate(layers) if layer.source is None
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
    decodes, chunks = [1, 2, 3, 300, *range(350, 356)], sorted(dice.sample(range(1, LONG), 7))
    others = [dice.choices(range(VOCAB_SIZE), k=length) for length in (300, 60)]
    yield Bits(Form.HOLES, 4, decodes, others)
    yield Bits(Form.STALE, 4, chunks, [])
    yield Bits(Form.HOLES, 32, chunks, others)
    yield Bits(Form.STALE, 16, decodes, [])


@pytest.mark.parametrize(
    ("runtime", "dtype"),
    [
        pytest.param("native", "float32", marks=pytest.mark.native),
        pytest.param("native", "bfloat16", marks=pytest.mark.native),
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
    assert num_turned > 4, "no ring turned"


@pytest.mark.native
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

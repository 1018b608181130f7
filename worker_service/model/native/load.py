"""Describes, packs and checks a transformers model, so that it runs natively."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...native.cpu.library import Library
from ...native.cpu.program import OutOfMemory
from ...native.cpu.selection import NoNativeStep, load_step
from ...native.cpu.weights import PackedModel
from ..control_groups import cpu_quota
from ..errors import ModelError, NotNative
from ..forward.layers import AttentionLayer, find_attention_layers
from ..forward.mixers import find_mixers
from ..forward.native import NativeRuntime
from ..guard.support import check_layers
from ..guard.tiny_replica import build_replica, replica_config, replica_length
from ..placement import Prepared
from ..progress import Progress
from ..settings import ModelSettings
from .check import QUANTIZED_TOLERANCE, Reference, check
from .recognition import describe

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


class NotNativeAfterAll(NotNative):
    """The model was packed and failed the check: its weights are gone from torch's modules."""


def try_native(
    model: Any,
    config: Any,
    prepared: Prepared,
    settings: ModelSettings,
    progress: Progress,
    before_packing: Callable[[Library], None] | None = None,
) -> NativeRuntime:
    """The model natively, with weights of int8 if the settings say so. Empties the modules of their weights.

    config: of the folder; a composite model's own may be that of its text only, of which no model can be built. before_packing is
    called with the step that will run, and may raise NotNative.
    Raises NotNative while the model is as it was, NotNativeAfterAll if it must be loaded again for torch, UnsupportedModel if it
    cannot be served at all.
    """
    device, dtype, max_model_len = prepared.device, prepared.dtype, prepared.max_model_len
    is_quantized = settings.quantize == "int8"
    if device.type != "cpu" or dtype not in NATIVE_DTYPES:
        raise NotNative(f"it computes float32 and bfloat16 on a CPU, not {dtype} on {device}".replace("torch.", ""))
    layers, mixers = find_attention_layers(model, device), find_mixers(model, device)
    check_layers(model.config, layers, max_model_len, mixers)
    if mixers:
        raise NotNative("it has recurrent layers")
    started = time.monotonic()
    with _reasons(NotNative):
        description = describe(model, layers, dtype, max_model_len)
        library = _library(dtype, progress)
        if before_packing is not None:
            before_packing(library)
        _check_sizes(library, layers, settings.block_size)
        _check_replica(config, _library(torch.float32, progress), max_model_len)
        reference = Reference(model, device, max_model_len)
    with _reasons(NotNativeAfterAll):
        packed = PackedModel(description, library, is_quantized)
        runtime = NativeRuntime(model.config, layers, dtype, device, (), packed, num_threads(), reference.finish)
        check(runtime, reference, QUANTIZED_TOLERANCE if is_quantized else None)
    weights = ", weights of int8" if is_quantized else ""
    seconds = time.monotonic() - started
    progress(
        f"runtime: native ({library.describe()}{weights}, {runtime.num_threads} threads; checked and packed in {seconds:.1f} s)"
    )
    return runtime


@contextmanager
def _reasons(kind: type[NotNative]) -> Iterator[None]:
    """Any error is a reason of this kind: models raise all kinds of errors for what they do not expect."""
    try:
        yield
    except (NotNative, OutOfMemory, ModelError) as error:
        raise kind(str(error)) from error
    except Exception as error:
        raise kind(f"{type(error).__name__}: {error}") from error


def num_threads() -> int:
    """CPUs given to this process: torch's number (affinity, OMP_NUM_THREADS, or set), and no more than a container's quota."""
    return min(torch.get_num_threads(), cpu_quota() or torch.get_num_threads())


def _library(dtype: torch.dtype, progress: Progress) -> Library:
    try:
        return load_step("bfloat16" if dtype == torch.bfloat16 else "float32", progress)
    except NoNativeStep as error:
        raise NotNative(str(error)) from error


def _check_replica(config: Any, library: Library, max_model_len: int) -> None:
    """Run a tiny model with the same rules in float32, whose rounding hides nothing. Raises NotNative."""
    small = replica_config(config, max_model_len)
    replica, cpu, length = build_replica(small), torch.device("cpu"), replica_length(config, max_model_len)
    layers = find_attention_layers(replica, cpu)
    description = describe(replica, layers, torch.float32, length)
    reference = Reference(replica, cpu, length)
    try:
        packed = PackedModel(description, library)
        check(NativeRuntime(small, layers, packed.dtype, cpu, (), packed, 1, reference.finish), reference)
    except (NotNative, OutOfMemory, ModelError) as error:
        raise NotNative(f"a tiny model of its kind: {error}") from error


def _check_sizes(library: Library, layers: Sequence[AttentionLayer], block_size: int) -> None:
    in_word = library.numbers_per_word
    for layer in layers:
        if layer.needs.k_head_dim % in_word or layer.needs.k_head_dim > library.max_head_size:
            raise NotNative(
                f"its heads have {layer.needs.k_head_dim} numbers; needed: an even number up to {library.max_head_size}"
            )
    if block_size % in_word:
        raise NotNative(f"blocks of {block_size} tokens; needed: an even number")

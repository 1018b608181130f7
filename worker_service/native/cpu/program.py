"""Runs packed steps of a packed model over KV tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ...attention.layer import KVLayer
from ...attention.packing import Packing
from ...attention.shared_prefix import SharedPrefix
from .library import GroupTables, Layer, ModelSizes, StepArguments
from .weights import PackedModel

_MIN_SAVED_TOKENS = 1024
"""KV reads that a shared prefix must save."""
PARTITION = 256
"""Keys that attention sums at once."""
_SHORT_PASSES = 4
"""A part with at most so many passes of rows may attend to a shared prefix together with others."""


_LAYER_PHASES = ("norm", "qkv", "rotary", "attention", "merge", "out", "norm", "up", "quantize", "down")
"""Names of a layer's phases, in the order of the enum in csrc/state.h."""


class OutOfMemory(RuntimeError):
    """No memory for a step's activations, no thread, or no tile registers."""


class Program:
    """A packed model bound to KV tensors, with its team of threads. One step at a time; `close` ends the team.

    The threads inherit the nice value of the thread that makes the Program. A block has the bytes that KVLayer says; the layout
    within it is the step's own (csrc/step.c).
    """

    def __init__(self, model: PackedModel, kv_layers: Sequence[KVLayer], num_threads: int) -> None:
        """Raises OutOfMemory."""
        self._handle: int | None = None
        self._model = model
        self._kv_layers = kv_layers  # their memory is used for as long as this object lives
        self._functions = model.library.functions
        group = max(layer.heads // layer.kv_heads for layer in model.layers)
        self._max_short = _SHORT_PASSES * model.library.rows_per_pass // group
        sizes = ModelSizes.from_buffer_copy(model.sizes)
        sizes.block_size = kv_layers[0].block_size
        sizes.num_groups = 1 + max(layer.group for layer in kv_layers)
        layers = (Layer * len(kv_layers))(*model.layers)
        for layer, kv_layer in zip(layers, kv_layers, strict=True):
            layer.k_cache, layer.v_cache = kv_layer.k_cache.data_ptr(), kv_layer.v_cache.data_ptr()
            layer.group = kv_layer.group
        self._handle = self._functions.kvpool_open(ctypes.byref(sizes), layers, num_threads)
        if self._handle is None:
            problem = self._functions.kvpool_problem().decode()
            raise OutOfMemory(f"a native step with {num_threads} threads cannot be set up: {problem}")

    def run(self, packing: Packing, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of the packed tokens. Returns logits [rows, vocab_size] float32 of the given tokens, and bool [T]: whether
        the token's KV is finite, and the last hidden state of a given one. Raises OutOfMemory, before any KV is written.
        """
        logits = torch.empty(len(rows), self._model.vocab_size)
        is_finite = torch.empty(packing.num_tokens, dtype=torch.bool)
        groups, _memory = self._groups(packing)  # both are used until the step has ended
        wanted = _int64s(rows)
        arguments = StepArguments(
            num_tokens=packing.num_tokens,
            num_parts=len(packing.starts),
            num_rows=len(rows),
            ids=packing.input_ids.data_ptr(),
            positions=packing.position_ids.data_ptr(),
            starts=packing.starts_there.data_ptr(),
            lengths=packing.query_lens_there.data_ptr(),
            groups=ctypes.addressof(groups),
            rows=ctypes.addressof(wanted),
            logits=logits.data_ptr(),
            is_finite=is_finite.data_ptr(),
        )
        if self._functions.kvpool_run(self._handle, ctypes.byref(arguments)):
            raise OutOfMemory(
                f"no memory for the activations of {packing.num_tokens} tokens: give a smaller --max-num-batched-tokens"
            )
        return logits, is_finite

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of the last step by kind of phase, as the calling thread saw them. The first call turns the clock on and returns
        zeros."""
        seconds = (ctypes.c_double * self._functions.kvpool_num_phases(self._handle))()
        self._functions.kvpool_phase_seconds(self._handle, seconds)
        names = ["embedding", *(_LAYER_PHASES * len(self._model.layers)), "end", "norm", "head"]
        sums = dict.fromkeys(["embedding", *_LAYER_PHASES, "end", "head"], 0.0)
        for name, spent in zip(names, seconds, strict=True):
            sums[name] += spent
        return sums

    def close(self) -> None:
        """End the threads. May be repeated."""
        if self._handle is not None:
            self._functions.kvpool_close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()

    def _groups(self, packing: Packing) -> tuple[Any, list[Any]]:
        """The blocks of each group, and the arrays that they point to."""
        groups = (GroupTables * len(packing.groups))()
        memory: list[Any] = []
        for index, (group, tensors) in enumerate(zip(groups, packing.groups, strict=True)):
            group.slots, group.table_rows = tensors.slot_mapping.data_ptr(), tensors.rows.data_ptr()
            group.tables, group.table_stride = tensors.block_tables.data_ptr(), tensors.block_tables.stride(0)
            prefixes = self._shared_prefixes(packing, index)
            group.num_prefixes = len(prefixes)
            members = _int64s([part for prefix in prefixes for part in prefix.parts])
            ends = _int64s(list(accumulate(len(prefix.parts) for prefix in prefixes)))
            blocks = _int64s([prefix.num_blocks for prefix in prefixes])
            group.prefix_parts, group.prefix_ends, group.prefix_blocks = map(ctypes.addressof, (members, ends, blocks))
            memory += members, ends, blocks
        return groups, memory

    def _shared_prefixes(self, packing: Packing, group: int) -> list[SharedPrefix]:
        """Sets of parts that share whole partitions; a long part reads its keys often enough by itself."""
        least = PARTITION // packing.block_size
        found = packing.shared_prefixes(_MIN_SAVED_TOKENS, self._max_short, group)
        return [prefix for prefix in found if prefix.num_blocks >= least]


def _int64s(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)

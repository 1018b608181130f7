"""Forward passes of encoder-decoder models by transformers' modules, whose decoder's attention is paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...attention.interface import bind
from ...attention.layer import AttentionBackend, AttentionCall, AttentionTarget, KVLayer
from ...attention.packing import Packing
from ...step import StateBlocks
from .contract import Forward, Selected
from .kv_cache import KVCache
from .layers import bind_layers, placeholder
from .modules import ModulesForward, ModulesRuntime
from .seq2seq import Seq2Seq


@dataclass(frozen=True, slots=True, eq=False)
class EncoderDecoderRuntime(ModulesRuntime):
    """The Runtime of an encoder-decoder model of transformers. None with recurrent layers is served."""

    seq2seq: Seq2Seq

    def bind(self, cache: KVCache, backend: AttentionBackend | None) -> Forward:
        assert backend is not None
        return _EncoderDecoderForward(self, cache, backend)


class _EncoderDecoderForward(ModulesForward):
    def __init__(self, runtime: EncoderDecoderRuntime, cache: KVCache, backend: AttentionBackend) -> None:
        super().__init__(runtime, cache, backend)
        self._seq2seq, self._kv_layers = runtime.seq2seq, cache.layers
        # The decoder projects what it is given as the encoder's output in every pass. In service that is one row, which nobody
        # reads.
        self._no_output = self._seq2seq.blank_output(1, self._device)

    def run(self, packing: Packing, rows: Sequence[int], states: Sequence[StateBlocks] = ()) -> Selected:
        assert not states, "no mixer has a state"
        self._backend.begin(packing)
        with self._seq2seq.positions.at(packing.position_ids):
            return self._selector.run(
                torch.tensor(rows, dtype=torch.int64, device=self._device),
                **self._seq2seq.inputs(packing.input_ids, self._no_output),
            )

    def encode(self, token_ids: Sequence[int], slots: torch.Tensor) -> None:
        output = self._seq2seq.encode(torch.tensor([list(token_ids)], device=self._device))
        # Where a layer projects the encoder's output is its own affair; so a pass over one token shows the KV of all of them.
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        for layer, kv_layer in zip(self._layers, self._kv_layers, strict=True):
            bind(layer.module, _writer(kv_layer, slots) if layer.needs.is_cross else placeholder)
        try:
            self._seq2seq.decode(token, token, output)
        finally:
            bind_layers(self._layers, self._kv_layers, self._backend)


def _writer(layer: KVLayer, slots: torch.Tensor) -> AttentionTarget:
    """A target that writes the KV of the encoder's output, and attends to nothing."""

    def write(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        layer.write(slots, key, value)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    return write

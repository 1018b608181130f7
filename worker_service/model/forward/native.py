"""Forward passes by the native step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...attention.layer import AttentionBackend
from ...attention.packing import Packing
from ...native.cpu.program import OutOfMemory, Program
from ...native.cpu.weights import PackedModel
from ...step import StateBlocks
from ..errors import ModelError
from .contract import Forward, Runtime, Selected
from .kv_cache import KVCache


@dataclass(frozen=True, slots=True, eq=False)
class NativeRuntime(Runtime):
    """The Runtime of a packed model, which has no recurrent layers."""

    packed: PackedModel
    num_threads: int
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What the model does to its logits after the head, such as a soft cap."""

    def bind(self, cache: KVCache, backend: AttentionBackend | None) -> Forward:
        try:
            return NativeForward(Program(self.packed, cache.layers, self.num_threads), self.finish)
        except OutOfMemory as error:
            raise ModelError(f"The native step cannot start: {error}.") from error

    def num_bytes(self) -> int:
        return self.packed.num_bytes


class NativeForward(Forward):
    """The Forward of a packed model."""

    def __init__(self, program: Program, finish: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self._program = program
        self._finish = finish

    def run(self, packing: Packing, rows: Sequence[int], states: Sequence[StateBlocks] = ()) -> Selected:
        assert not states, "a native model has no recurrent layers"
        logits, is_finite = self._program.run(packing, rows)
        return Selected(logits if self._finish is None else self._finish(logits), is_finite)

    def phase_seconds(self) -> dict[str, float]:
        """See Program."""
        return self._program.phase_seconds()

    def close(self) -> None:
        self._program.close()

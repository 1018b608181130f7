"""Self-test of a backend at start-up: compares it with plain torch on the model's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..step import SequencePart
from .layer import AttentionBackend, AttentionCall, AttentionSpec, KVLayer, LayerNeeds
from .layout import BlockGroup
from .packing import Packer
from .torch_backend import NEVER_SHARE, TorchAttention

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 4e-2}
"""Largest difference of outputs, which are means of standard normal values."""
_SHORT_WINDOW = 5
"""An error of one token in a window of thousands is smaller than rounding; in this one it shows."""
_MAX_CONTEXT = 4096
_SCORE_DEVIATION = 2.0
"""Standard deviation of the scores: keys have different weights, and none dominates."""
_CAPPED_SHARE = 0.5
"""The same for models with a soft cap, as a share of it: large enough to show a missing cap."""


class SelfTestFailed(RuntimeError):
    """The backend's results are wrong, or it fails."""


def run_self_test(backend: AttentionBackend, setting: AttentionSpec) -> None:
    """Prefill, chunks after a context, decodes and a shared prefix over scattered blocks, whose unwritten slots are NaN.

    Compares outputs and caches with TorchAttention in float32. Raises SelfTestFailed.
    """
    with torch.inference_mode():
        for each in _cases(setting.needs):
            try:
                _Trial(backend, each, setting).run()
            except SelfTestFailed:
                raise
            except Exception as error:  # kernels raise all kinds of errors for what they do not support
                raise SelfTestFailed(f"{type(error).__name__}: {error}") from error


def _cases(needs: Sequence[LayerNeeds]) -> list[LayerNeeds]:
    cases = list(dict.fromkeys(needs))
    windowed = [each._replace(window=_SHORT_WINDOW) for each in cases if each.window is not None]
    return list(dict.fromkeys(cases + windowed))


class _Trial:
    """The test of one layer's shape."""

    def __init__(self, backend: AttentionBackend, needs: LayerNeeds, setting: AttentionSpec) -> None:
        dtype, device, block_size = setting.dtype, setting.device, setting.block_size
        self._needs, self._dtype, self._device, self._block_size = needs, dtype, device, block_size
        self._random = torch.Generator().manual_seed(0)
        self._lengths = self._sequence_lengths()
        self._tables = self._block_tables()
        num_blocks = 1 + max(block for table in self._tables for block in table)
        self._packer = Packer(block_size, [BlockGroup(num_blocks)], device)
        self._backend, self._layer = backend, self._new_layer(num_blocks, dtype)
        self._oracle = TorchAttention(torch.float32, NEVER_SHARE)
        self._oracle_layer = self._new_layer(num_blocks, torch.float32)
        sinks = self._normal(needs.num_heads).to(device, dtype) if needs.has_sinks else None
        self._call = AttentionCall(needs.scaling, needs.window, needs.softcap, sinks)

    def _sequence_lengths(self) -> list[int]:
        size = self._block_size
        long = min(_MAX_CONTEXT, max(3 * size + 5, 100, self._needs.window or 0) + size + 3)
        return [1, 2, max(3, size - 1), size, size + 1, long, 2 * size + 7]

    def _block_tables(self) -> list[list[int]]:
        """Scattered blocks; the last sequence begins with the blocks of the one before it."""
        counts = [-(-(length + 2) // self._block_size) for length in self._lengths]
        order = (torch.randperm(sum(counts), generator=self._random) + 1).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        tables[-1][:2] = tables[-2][:2]
        return tables

    def _new_layer(self, num_blocks: int, dtype: torch.dtype) -> KVLayer:
        needs, shape = self._needs, (num_blocks, self._block_size)
        caches = [
            torch.full((*shape, needs.num_kv_heads, dim), float("nan"), dtype=dtype, device=self._device)
            for dim in (needs.k_head_dim, needs.v_head_dim)
        ]
        for cache in caches:
            cache[0] = 0
        return KVLayer(0, needs.window, k_cache=caches[0], v_cache=caches[1])

    def _steps(self) -> Iterator[list[tuple[int, int, int]]]:
        """Steps as lists of (sequence, first position, end)."""
        shared = len(self._lengths) - 1
        first = 2 * self._block_size
        cuts = [max(1, length // 3) for length in self._lengths]
        cuts[shared - 1] = max(cuts[shared - 1], first)
        yield [(index, 0, cut) for index, cut in enumerate(cuts) if index != shared]
        rest = [(index, cut, self._lengths[index]) for index, cut in enumerate(cuts) if index != shared]
        rest = [chunk for chunk in rest if chunk[1] < chunk[2]]
        yield [(shared, first, self._lengths[shared]), *reversed(rest)]
        yield [(index, length, length + 1) for index, length in enumerate(self._lengths)]
        yield [(0, self._lengths[0] + 1, self._lengths[0] + 2)]

    def run(self) -> None:
        for step in self._steps():
            parts = [SequencePart([0] * (end - first), first, (self._tables[index],)) for index, first, end in step]
            packing = self._packer.pack(parts)
            query, key, value = self._inputs(packing.num_tokens)
            self._backend.begin(packing)
            ours = self._backend.attend(self._layer, query, key, value, self._call)
            self._oracle.begin(packing)
            floats = (query.float(), key.float(), value.float())
            self._compare(ours, self._oracle.attend(self._oracle_layer, *floats, self._call))
            self._compare_caches()

    def _inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k and v as models pass them: [1, H, ΣT, D], views of [1, ΣT, H, D]."""
        needs = self._needs
        deviation = _SCORE_DEVIATION if needs.softcap is None else _CAPPED_SHARE * needs.softcap
        # A product of two standard normal vectors of D numbers deviates by √D.
        factor = deviation / (needs.scaling * needs.k_head_dim**0.5)
        query = self._normal(1, num_tokens, needs.num_heads, needs.k_head_dim) * factor
        key = self._normal(1, num_tokens, needs.num_kv_heads, needs.k_head_dim)
        value = self._normal(1, num_tokens, needs.num_kv_heads, needs.v_head_dim)
        query, key, value = (tensor.to(self._device, self._dtype).transpose(1, 2) for tensor in (query, key, value))
        return query, key, value

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random)

    def _compare(self, ours: torch.Tensor, reference: torch.Tensor) -> None:
        if ours.shape != reference.shape or not ours.is_contiguous():
            raise SelfTestFailed(
                f"the output is {tuple(ours.shape)}, {'' if ours.is_contiguous() else 'not '}contiguous, where "
                f"{tuple(reference.shape)}, contiguous, was needed ({self._shape()})"
            )
        difference = float((ours.float() - reference).abs().max())
        if not difference <= _TOLERANCE[self._dtype]:
            raise SelfTestFailed(
                f"outputs differ from plain torch by {difference:.3g}, rounding explains {_TOLERANCE[self._dtype]:.3g} "
                f"({self._shape()})"
            )

    def _compare_caches(self) -> None:
        for ours, reference in (
            (self._layer.k_cache, self._oracle_layer.k_cache),
            (self._layer.v_cache, self._oracle_layer.v_cache),
        ):
            expected = reference.to(self._dtype)
            if not ((ours == expected) | (ours.isnan() & expected.isnan())).all():
                raise SelfTestFailed(f"KV was not written to its slots, or also to others ({self._shape()})")

    def _shape(self) -> str:
        needs = self._needs
        dims = (
            f"{needs.k_head_dim}" if needs.k_head_dim == needs.v_head_dim else f"{needs.k_head_dim}/{needs.v_head_dim}"
        )
        window = "full attention" if needs.window is None else f"window {needs.window}"
        return f"{needs.num_heads} heads, {needs.num_kv_heads} KV heads, head size {dims}, {window}, block size {self._block_size}"

"""Sequences whose K and V are in a NaN-filled paged cache, and what a slow oracle computes for them, query by query."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

import torch

from kvpool.worker_service.attention.invariance import FIXED_SHAPES
from kvpool.worker_service.attention.layer import AttentionCall, KVLayer
from kvpool.worker_service.attention.layout import BlockGroup
from kvpool.worker_service.attention.packing import pack
from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.attention.torch_plan import PlanShapes
from kvpool.worker_service.step import SequencePart as Part

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NEVER = 1 << 60


@dataclass(frozen=True)
class Shape:
    """Of a layer. `has_bias`: it adds one by distance to the scores."""

    heads: int = 6
    kv_heads: int = 2
    k_dim: int = 8
    v_dim: int = 8
    has_bias: bool = False


def nan_layer(num_blocks: int, shape: Shape, window: int | None = None, *, is_cross: bool = False) -> KVLayer:
    """A layer in whose cache only the null block was written."""
    size = (num_blocks, BLOCK_SIZE, shape.kv_heads)
    k_cache, v_cache = (torch.full((*size, dim), float("nan")) for dim in (shape.k_dim, shape.v_dim))
    k_cache[0] = v_cache[0] = 0
    return KVLayer(int(is_cross), window, k_cache, v_cache, is_cross=is_cross)


def shuffled_blocks(num_blocks: int) -> list[int]:
    """All blocks but the null block."""
    blocks = list(range(1, num_blocks))
    random.Random(1).shuffle(blocks)
    return blocks


def one_query(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[H, Dv]: a query [H, Dk] that sees these keys [T, KV, Dk] and values. `bias`: [H, T], added to the scores."""
    num_heads, num_kv_heads = len(query), key.shape[1]
    kv_heads = [head // (num_heads // num_kv_heads) for head in range(num_heads)]
    scores = (key[:, kv_heads].double() * query.double()).sum(-1) * call.scaling
    if bias is not None:
        scores = scores + bias.T.double()
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks[None].double()])
    weights = scores.softmax(0)[: len(key)]
    return (weights[..., None] * value[:, kv_heads].double()).sum(0).float()


class Scene:
    """Sequences with random K and V, of which all but the last few positions lie in a NaN-filled paged cache."""

    def __init__(
        self, lengths: list[tuple[int, int]], shape: Shape, window: int | None, shared_tokens: int = 0
    ) -> None:
        """lengths: (tokens in the cache, new tokens) per sequence; all share the KV of the first shared_tokens."""
        assert shared_tokens % BLOCK_SIZE == 0
        torch.manual_seed(0)
        self.lengths, self.shape = lengths, shape
        num_blocks = 1 + sum(-(-(start + new) // BLOCK_SIZE) for start, new in lengths)
        self.num_blocks, self.window = num_blocks, window
        self.layer, free = nan_layer(num_blocks, shape, window), shuffled_blocks(num_blocks)
        self.bias = torch.randn(shape.heads, max(map(sum, lengths))) * 2 if shape.has_bias else None
        self.layer = replace(self.layer, distance_bias=self.bias)
        common_k = torch.randn(shared_tokens, shape.kv_heads, shape.k_dim)
        common_v = torch.randn(shared_tokens, shape.kv_heads, shape.v_dim)
        common = [free.pop() for _ in range(shared_tokens // BLOCK_SIZE)]
        self.keys, self.values, self.parts = [], [], []
        for start, new in lengths:
            shared = shared_tokens if start >= shared_tokens else 0
            own = start + new - shared
            key = torch.cat([common_k[:shared], torch.randn(own, shape.kv_heads, shape.k_dim)])
            value = torch.cat([common_v[:shared], torch.randn(own, shape.kv_heads, shape.v_dim)])
            table = [*common[: shared // BLOCK_SIZE], *(free.pop() for _ in range(-(-own // BLOCK_SIZE)))]
            for position in range(start):
                block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                self.layer.k_cache[block, offset] = key[position]
                self.layer.v_cache[block, offset] = value[position]
            self.keys.append(key)
            self.values.append(value)
            self.parts.append(Part([0] * new, start, (table,)))
        self.query = torch.randn(1, shape.heads, sum(new for _, new in lengths), shape.k_dim)

    def paged(self, call: AttentionCall, min_shared_tokens: int, shapes: PlanShapes = FIXED_SHAPES[0]) -> torch.Tensor:
        backend = TorchAttention(torch.float32, min_shared_tokens, shapes)
        backend.begin(pack(self.parts, BLOCK_SIZE, (BlockGroup(self.num_blocks, self.window),), CPU))
        new_k = torch.cat([key[start:] for key, (start, _) in zip(self.keys, self.lengths, strict=True)])
        new_v = torch.cat([value[start:] for value, (start, _) in zip(self.values, self.lengths, strict=True)])
        return backend.attend(self.layer, self.query, new_k.transpose(0, 1)[None], new_v.transpose(0, 1)[None], call)

    def oracle(self, call: AttentionCall) -> torch.Tensor:
        rows, index = [], 0
        for key, value, (start, new) in zip(self.keys, self.values, self.lengths, strict=True):
            for position in range(start, start + new):
                first = 0 if call.window is None else max(0, position + 1 - call.window)
                seen = slice(first, position + 1)
                distances = position - torch.arange(first, position + 1)
                bias = None if self.bias is None else self.bias[:, distances]
                rows.append(one_query(self.query[0, :, index], key[seen], value[seen], call, bias))
                index += 1
        return torch.stack(rows)[None]


@cache
def truth(
    lengths: tuple[tuple[int, int], ...], shape: Shape, call: AttentionCall, shared_tokens: int = 0
) -> torch.Tensor:
    """The oracle's output for such a scene, which is the same every time."""
    return Scene([*lengths], shape, call.window, shared_tokens).oracle(call)

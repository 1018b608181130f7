"""Attention over all keys of a row, merged from attention over its segments from left to right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .softmax import PartialAttention


class AttentionPiece(NamedTuple):
    """Attention of some rows of a step over one segment each."""

    rows: torch.Tensor | None
    """[N] distinct rows; None: all rows in order."""
    attended: PartialAttention
    is_first: bool
    """Whether no earlier piece has any of these rows."""


class _Running(NamedTuple):
    """Attention over the segments so far: out = sum / weight, and exp(peak) · weight is the sum of exp(score)."""

    sum: torch.Tensor
    """[ΣT, Hq, Dv], in float32 once there is more than one segment."""
    peak: torch.Tensor
    """[ΣT, Hq] float32."""
    weight: torch.Tensor | None
    """[ΣT, Hq] float32; None: 1 everywhere, as after the first segment."""


def join(pieces: Iterable[AttentionPiece], num_rows: int) -> torch.Tensor:
    """The outputs of pieces without common rows, [ΣT, Hq, Dv]. Every row must be in one piece."""
    joined: torch.Tensor | None = None
    for rows, attended, _ in pieces:
        if rows is None:
            return attended.out
        if joined is None:
            joined = attended.out.new_empty(num_rows, *attended.out.shape[1:])
        joined.index_copy_(0, rows, attended.out)
    assert joined is not None, "a step has rows"
    return joined


def merge(pieces: Iterable[AttentionPiece], num_rows: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention over the union of each row's segments, [ΣT, Hq, Dv] in float32; every piece has a log-sum-exp.

    Online softmax, as in FlashAttention, in the order of the pieces. exp is the only operation that is not rounded exactly, and
    torch computes it the same at every place of a tensor, unlike logaddexp and sigmoid. sinks: [Hq] logits without a value.
    """
    running: _Running | None = None
    for piece in pieces:
        running = _add(running, piece, num_rows)
    assert running is not None, "a step has rows"
    weight = running.weight
    if sinks is not None:
        share = torch.exp(sinks.float() - running.peak)
        weight = share.add_(1) if weight is None else share.add_(weight)
    return running.sum if weight is None else running.sum / weight[..., None]


def _add(running: _Running | None, piece: AttentionPiece, num_rows: int) -> _Running:
    rows, (out, lse), is_first = piece
    assert lse is not None, "computed if there is more than one segment"
    if rows is None:
        return _Running(out, lse, None) if running is None else _more(running, out, lse)
    if running is None:
        running = _nothing(num_rows, out, lse)
    weight = torch.ones_like(running.peak) if running.weight is None else running.weight
    whole = (running.sum.float(), running.peak, weight)
    if is_first:
        some = _Running(out.float(), lse, torch.ones_like(lse))
    else:
        some = _more(_Running(*(tensor.index_select(0, rows) for tensor in whole)), out, lse)
    assert some.weight is not None, "set above, or by _more"
    for tensor, values in zip(whole, (some.sum, some.peak, some.weight), strict=True):
        tensor.index_copy_(0, rows, values)
    return _Running(*whole)


def _more(running: _Running, out: torch.Tensor, lse: torch.Tensor) -> _Running:
    """The state after one more segment."""
    peak = torch.maximum(running.peak, lse)
    before, now = (running.peak - peak).exp_(), (lse - peak).exp_()
    total = (running.sum * before[..., None]).add_(out * now[..., None])
    return _Running(total, peak, before.add_(now) if running.weight is None else (running.weight * before).add_(now))


def _nothing(num_rows: int, out: torch.Tensor, lse: torch.Tensor) -> _Running:
    """Rows without keys: adding the first segment gives that segment, bit by bit."""
    shape = (num_rows, *lse.shape[1:])
    lowest = torch.finfo(torch.float32).min
    return _Running(
        torch.zeros(*shape, out.shape[-1], device=out.device),
        torch.full(shape, lowest, device=out.device),
        torch.zeros(shape, device=out.device),
    )

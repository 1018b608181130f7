"""Draws the tokens of rows that are not greedy: one uniform number through the inverse of the distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...step import SamplingParams
from . import host_choice
from .adjustment import Draw
from .truncation import NUM_CANDIDATES, TruncationLimits, portions, select, truncate, weigh

MAX_WEIGHTS = 1 << 22
"""Weights of the exact choice computed at a time: 32 MiB. More rows are drawn in slices."""

# Philox 4x64-10.
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_BUMPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_WORD = 2**64 - 1
_ROW_BYTES = 16


def draw_tokens(logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    """A token for each of the rows [N] of the logits [·, vocab_size], the largest of each row finite; temperatures above 0. Each
    token is drawn with its own number from the row after truncation. One draw for each of the rows."""
    params = [draw.sampling for draw in draws]
    numbers = uniforms([sampling.seed for sampling in params], [draw.position for draw in draws])
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return draw_exactly(logits[list(rows)].float(), params, numbers)
    chosen = host_choice.choose(logits.numpy(), rows, params, numbers)
    tokens: list[int] = chosen.tokens.tolist()
    if uncertain := [index for index, is_certain in enumerate(chosen.is_certain.tolist()) if not is_certain]:
        exact = draw_exactly(
            logits[[rows[index] for index in uncertain]],
            [params[index] for index in uncertain],
            [numbers[index] for index in uncertain],
        )
        for index, token_id in zip(uncertain, exact, strict=True):
            tokens[index] = token_id
    return tokens


def draw_exactly(logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """Draw as `draw_tokens` does, for all rows of float32 logits on any device, by sums in one order."""
    size = max(1, MAX_WEIGHTS // logits.shape[1])
    tokens: list[int] = []
    for first in range(0, len(params), size):
        some = slice(first, first + size)
        tokens += _draw_slice(logits[some], params[some], numbers[some]).tolist()
    return tokens


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> list[float]:
    """One number in [0, 1) for each seed and position, which decides the token there. It is counter-based, so it needs no history.
    Equals the first number of numpy's Generator(Philox(key=seed, counter=position)). At least one row; raises OverflowError unless
    0 ≤ seed < 2**64 and 0 ≤ position < 2**64 − 1.

    Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). All rows are in one Python integer, 128 bits
    each, with a word in the lower half: so the product of a word and a constant stays within its row.
    """
    each = int.from_bytes((1).to_bytes(_ROW_BYTES, "little") * len(seeds), "little")
    low = each * _WORD
    bump, key, other_key = each * _BUMPS[0], _pack(seeds), 0
    # numpy increments the counter before it draws.
    words = (_pack([position + 1 for position in positions]), 0, 0, 0)
    for _ in range(_NUM_ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = (
            ((second >> 64) & low) ^ words[1] ^ key,
            second & low,
            ((first >> 64) & low) ^ words[3] ^ (each * other_key),
            first & low,
        )
        key, other_key = (key + bump) & low, (other_key + _BUMPS[1]) & _WORD
    rows = np.frombuffer(words[0].to_bytes(_ROW_BYTES * len(seeds), "little"), dtype="<u8")[::2]
    numbers: list[float] = ((rows >> 11) * 2.0**-53).tolist()
    return numbers


def _pack(words: Sequence[int]) -> int:
    return int.from_bytes(bytes(_ROW_BYTES // 2).join([word.to_bytes(8, "little") for word in words]), "little")


def _draw_slice(logits: torch.Tensor, params: Sequence[SamplingParams], drawn: Sequence[float]) -> torch.Tensor:
    device, vocab_size = logits.device, logits.shape[1]
    tokens = torch.empty(len(params), dtype=torch.int64, device=device)
    numbers = torch.tensor(drawn, dtype=torch.float64, device=device)[:, None]
    limits = TruncationLimits.of(params, vocab_size, device)
    ranked = limits.is_ranked(vocab_size)
    rows = (~ranked).nonzero()[:, 0]
    for some in portions(rows, vocab_size):
        tokens[some] = invert(weigh(select(logits, some), limits.rows(some)), numbers[some])
    rows = ranked.nonzero()[:, 0]
    for num_candidates in (*(count for count in NUM_CANDIDATES if count < vocab_size), vocab_size):
        if len(rows):
            ids, weights, is_complete = truncate(select(logits, rows), limits.rows(rows), num_candidates)
            ids, order = ids.sort(dim=-1)
            chosen = invert(weights.gather(1, order), numbers[rows])
            tokens[rows] = ids.gather(1, chosen[:, None])[:, 0]
            rows = rows[~is_complete]
    return tokens


def invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Columns [N] for the numbers [N, 1] in [0, 1), by the normalised cumulative sums of the weights [N, M]."""
    cumulative = torch.cumsum(weights, dim=-1)
    columns = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)[:, 0]
    # Rounding may lift a number to the end; then it is the last column with a weight.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)[:, 0]
    return torch.minimum(columns, last)

"""Log-probabilities under the model: temperature 1, before penalties and truncation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...engine.sampling_params import RowLogprobs
from .ranking import best


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[RowLogprobs]:
    """The log-probabilities of each row of logits [N, vocab_size]: of its token in token_ids [N], and of its num_top most likely
    tokens (all tokens if there are fewer)."""
    logits = logits.float()
    logprobs = torch.log_softmax(logits, dim=-1)
    own: list[float] = logprobs.gather(1, token_ids[:, None])[:, 0].tolist()
    most = min(max(num_top, default=0), logits.shape[1])
    if not most:
        return [RowLogprobs(value, []) for value in own]
    ids = best(logits, most)
    values = logprobs.gather(1, ids)
    top = [list(zip(*pairs, strict=True)) for pairs in zip(ids.tolist(), values.tolist(), strict=True)]
    return [RowLogprobs(value, pairs[:count]) for value, pairs, count in zip(own, top, num_top, strict=True)]

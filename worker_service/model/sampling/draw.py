"""The input of sampling for one token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ...engine.sampling_params import SamplingParams
from ...engine.token_counts import TokenCounts


class Draw(NamedTuple):
    """Options, position and sequence of one row of logits."""

    sampling: SamplingParams
    position: int
    """Absolute position that the token will have in its sequence."""
    banned_ids: Collection[int] = ()
    """Ids that must not be chosen."""
    counts: TokenCounts | None = None
    """The sequence's tokens; needed if `sampling` has penalties."""
    forced_ids: Sequence[int] = ()
    """Ids of which one must be chosen; none: any may be."""
    num_candidates: int = 0
    """Best tokens to find for a beam search, in place of a choice."""

    @property
    def adjusts_logits(self) -> bool:
        """Whether the token is chosen from other logits than the model's."""
        return bool(self.sampling.logit_bias or self.banned_ids or self.forced_ids) or self.sampling.has_penalties

"""What Explain says of a prompt just before Allocate is asked for it: the two must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.cache_service.core.explanation import SessionExplanation
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import AllocateItem, BlockMissCause, Granted, Uplink, Wait
from kvpool.cache_service.core.refusal import Refusal


class Prediction(NamedTuple):
    """Of the first item of an Allocate."""

    item: AllocateItem
    explained: SessionExplanation
    waits_for_itself: bool
    """The prompt would wait for another attempt of its own sequence, which Allocate never lets it do."""
    has_windows: bool
    """Or a state."""
    may_wait_elsewhere: bool
    """A sequence to wait for may have too many boundaries to be told of another one, where the prompt would go on."""

    @classmethod
    def of(cls, manager: CacheManager, uplink: Uplink, items: Sequence[AllocateItem]) -> Prediction | None:
        """Ask Explain. None where the call does more than to allocate, or the sequence lives: then its table is repeated."""
        session = next((one for one in manager.sessions if one.number == uplink.session), None)
        if session is None or session.recovering or not items:
            return None
        item = items[0]
        stated = uplink.reserve_wishes + (None,) * len(session.pools)
        returned = uplink.returned + ((),) * len(session.pools)
        refills = any(
            (session.reserve_wishes[group] if stated[group] is None else stated[group] or 0)
            > pool.num_reserved - len(returned[group])
            for group, pool in enumerate(session.pools)
        )
        if refills or (item.key.sequence_id, item.key.attempt) in session.sequences:
            return None
        try:
            (explained,) = manager.explain(item.root, item.tokens, session.worker_id).workers
        except Refusal as refusal:
            refusal.with_traceback(None)
            return None
        leader = explained.miss.leader
        own = [key for key in session.sequences if key[0] == item.key.sequence_id]
        is_full = session.downlink.is_full or any(
            len(sequence.boundaries) >= manager.limits.max_boundaries for sequence in session.sequences.values()
        )
        has_windows = bool(session.dependents)
        return cls(item, explained, bool(own) and leader is not None, has_windows, has_windows and is_full)

    def require(self, outcome: Granted | Wait | Refusal) -> None:
        """Compare with what Allocate has answered."""
        miss, item = self.explained.miss, self.item
        is_here = miss.cause is BlockMissCause.BEING_COMPUTED and miss.other_worker is None
        if isinstance(outcome, Wait) and not outcome.position:  # for an encoder, which says nothing of the prompt
            assert item.max_cached_tokens == 0 or not self.explained.encoder_cached
        elif isinstance(outcome, Wait) and not self.waits_for_itself:
            limit = item.max_cached_tokens
            # With a limit it is another node, not as deep, that the prompt would wait for.
            assert is_here or (self.has_windows and limit is not None), f"Allocate waits, Explain says {miss.cause}"
            assert limit is not None or self.may_wait_elsewhere or outcome == miss.leader
        elif isinstance(outcome, Granted):
            may_not_wait = self.waits_for_itself or self.may_wait_elsewhere
            assert item.no_wait or may_not_wait or not is_here or item.max_cached_tokens is not None
            most = self.explained.num_cached_tokens
            if item.max_cached_tokens is None:
                assert outcome.num_cached_tokens == most, "Explain promises other tokens than Allocate serves"
            else:
                assert outcome.num_cached_tokens <= most

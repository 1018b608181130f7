"""What a beam search over the tracer model finds that computes every text anew."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvpool.worker_service.engine.beam_search import BeamParams, BeamSearch
from kvpool.worker_service.engine.step import BeamCandidate, BeamCandidates
from tests import tracer


def expected_beams(
    prompt: Sequence[int],
    count: int,
    params: BeamParams,
    ending_ids: Collection[int] = (),
    tenant_salt: str = "",
    encoder_tokens: Sequence[int] = (),
) -> list[tuple[list[int], bool]]:
    """The texts of at most `count` tokens, best first, and whether each was ended by one of `ending_ids`, no part of it."""
    root = tracer.encoder_digest(encoder_tokens, tenant_salt) if encoder_tokens else tracer.root_digest(tenant_salt)
    search = BeamSearch(params, max_new_tokens=count, num_ending_ids=len(ending_ids))
    while not search.is_over:
        rows = []
        for node in search.beams:
            slots: list[int] = []
            text = [] if node is None else [one.token_id for one in node.tokens()]
            tracer.extend(slots, root, [*prompt, *text])
            best = tracer.best_tokens(slots, search.num_candidates)
            rows.append(BeamCandidates([BeamCandidate(token_id, score, score) for token_id, score in best], []))
        search.advance(rows, lambda _, token_id: token_id in ending_ids)
    texts = [([one.token_id for one in ended.node.tokens()], ended.has_met_end) for ended in search.ended]
    return [(text[:-1] if has_met_end else text, has_met_end) for text, has_met_end in texts]

"""What a beam search over the tracer model finds that computes every text anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvpool.worker_service.engine.beam_search import BeamParams, BeamSearch
from kvpool.worker_service.step import BeamCandidate, BeamCandidates
from tests import tracer


def candidates_after(slots: Sequence[int | None], count: int) -> BeamCandidates:
    """What a beam may continue with of which these slots were read."""
    best = tracer.best_tokens(slots, count)
    return BeamCandidates([BeamCandidate(token_id, score, score) for token_id, score in best], [])


def search_anew(
    search: BeamSearch, candidates_of: Callable[[list[int], int], BeamCandidates], ending_ids: Collection[int] = ()
) -> list[tuple[list[int], bool]]:
    """All that a search has ended, best first: texts, and whether each was ended by one of `ending_ids`, no part of it.
    `candidates_of`: a text, and how many there must be."""
    while not search.is_over:
        texts = [[] if node is None else [one.token_id for one in node.tokens()] for node in search.beams]
        rows = [candidates_of(text, search.num_candidates) for text in texts]
        search.advance(rows, lambda _, token_id: token_id in ending_ids)
    texts_of = [([one.token_id for one in ended.node.tokens()], ended.has_met_end) for ended in search.ended]
    return [(text[:-1] if has_met_end else text, has_met_end) for text, has_met_end in texts_of]


def expected_beams(
    prompt: Sequence[int],
    count: int,
    params: BeamParams,
    ending_ids: Collection[int] = (),
    tenant_salt: str = "",
    encoder_tokens: Sequence[int] = (),
) -> list[tuple[list[int], bool]]:
    """The texts of at most `count` tokens, best first, as `search_anew` gives them."""
    root = tracer.root_digest(tenant_salt, encoder_tokens)

    def candidates_of(text: list[int], num_candidates: int) -> BeamCandidates:
        slots: list[int] = []
        tracer.extend(slots, root, [*prompt, *text])
        return candidates_after(slots, num_candidates)

    search = BeamSearch(params, max_new_tokens=count, num_ending_ids=len(ending_ids))
    return search_anew(search, candidates_of, ending_ids)

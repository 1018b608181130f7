"""What a worker can serve at all."""

from __future__ import annotations

import pytest

from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.engine.beam_search import BeamParams
from kvpool.worker_service.engine.capacity import Capacity
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.request import GenerationParams
from kvpool.worker_service.engine.settings import EngineSettings
from tests.cache_groups import groups_of

MODEL = EngineSettings(model_fingerprint="m", vocab_size=100, max_model_len=64, max_num_seqs=8)


def asking(num_prompt: int, max_tokens: int, num_beams: int = 1) -> GenerationParams:
    """A request for so many beams; 1: no search."""
    beams = BeamParams(num_beams) if num_beams > 1 else None
    return GenerationParams("s", 1, [1] * num_prompt, max_tokens=max_tokens, beams=beams)


@pytest.mark.parametrize(("num_beams", "expected"), [(1, 47), (2, 23), (4, 11), (8, 3)])
def test_without_a_limit_a_text_is_as_long_as_the_pool_lets_all_beams_be(num_beams: int, expected: int) -> None:
    """They share the full blocks of the prompt; of the others each may need its own."""
    capacity = Capacity(MODEL, CacheSettings(block_size=4, groups=groups_of((15,))))
    found = capacity.max_tokens(asking(10, 0, num_beams))
    assert found == expected
    assert capacity.max_tokens(asking(10, found, num_beams)) == found
    whose = f"of each of {num_beams} beams " if num_beams > 1 else ""
    with pytest.raises(EngineError, match=rf"{whose}need \d+ blocks of 4; this worker has 14") as caught:
        capacity.max_tokens(asking(10, found + 1, num_beams))
    assert caught.value.kind is ErrorKind.NEVER_FITS


def test_a_search_needs_as_many_places_as_it_has_beams() -> None:
    with pytest.raises(EngineError, match="9 beams are computed together"):
        Capacity(MODEL, CacheSettings(block_size=4, groups=groups_of((99,)))).max_tokens(asking(1, 4, 9))


def test_a_text_needs_blocks_of_each_group() -> None:
    capacity = Capacity(MODEL, CacheSettings(block_size=4, groups=groups_of((100, 9))))
    assert capacity.max_tokens(asking(20, 13)) == 13
    with pytest.raises(EngineError, match="this worker has 8") as caught:
        capacity.max_tokens(asking(20, 14))
    assert caught.value.kind is ErrorKind.NEVER_FITS


@pytest.mark.parametrize(("num_states", "most"), [(4, 1), (5, 2), (7, 4)])
def test_each_beam_needs_a_state_of_its_own(num_states: int, most: int) -> None:
    """The first one what it is granted and has hit."""
    settings = CacheSettings(block_size=4, groups=groups_of((200, num_states), grid=4))
    capacity = Capacity(MODEL, settings)
    assert capacity.max_tokens(asking(3, 5, most)) == 5
    with pytest.raises(EngineError, match=r"beams need .* blocks of group 1 \(states\).*ask for fewer beams") as caught:
        capacity.max_tokens(asking(3, 5, most + 1))
    assert caught.value.kind is ErrorKind.NEVER_FITS

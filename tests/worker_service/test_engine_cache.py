"""The worker's cache side alone, with hand-made answers: what it says, how often, and which answers end its session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvpool.protocol.tokens import pack_tokens
from kvpool.v1 import cache_pb2
from kvpool.worker_service.cache.engine_cache import Computed, EngineCache
from kvpool.worker_service.cache.groups.dense import DenseGroup
from kvpool.worker_service.cache.link_state import MutatingCall
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.settings import CacheSettings
from tests.worker_service.windowed import ROOT, Worker, fill

_STEP_SECONDS = 0.001


def _cache(**settings: Any) -> EngineCache:
    """With an open session that has nothing to report. `num_blocks`: of its one group."""
    if "num_blocks" in settings:
        settings["groups"] = (DenseGroup(settings.pop("num_blocks")),)
    cache = EngineCache(CacheSettings(**settings))
    cache.on_registered(cache_pb2.RegisterResponse(epoch=1, session=1))
    return cache


def _sequence(name: str, prompt: list[int], max_new_tokens: int) -> CacheSequence:
    return CacheSequence(name, 1, ROOT, prompt, max_new_tokens=max_new_tokens)


def _call(cache: EngineCache, method: str, *candidates: CacheSequence, now: float = 0.0) -> Any:
    """The next Call, which must be there; its request is of this method."""
    call = cache.next_call(lambda: list(candidates), now)
    assert call is not None
    assert type(call.request).__name__ == f"{method}Request"
    return call


def _grants(reserve: Sequence[int]) -> cache_pb2.AllocateResponse:
    """The answer to an Allocate of one item: block 1 is its table, the others are for the reserve."""
    answer = _table(0, ([1], [1]))
    grant = answer.downlink.entries.add(number=1).grant
    grant.block_ids[:], grant.generations[:] = reserve, [1] * len(reserve)
    return answer


@pytest.mark.parametrize("report_seconds", [0.01, 0.05])
@pytest.mark.parametrize("steps_on_the_way", [0, 1, 5])
def test_calls_grow_with_time_and_not_with_steps(report_seconds: float, steps_on_the_way: int) -> None:
    """Each step fills a block; those of `report_seconds` go out in one call, also where the answer takes longer than a step."""
    cache = _cache(block_size=1, num_blocks=256, report_seconds=report_seconds)
    sequence = _sequence("s", [1], 200)
    cache.on_reply(_call(cache, "Allocate", sequence), _grants(range(2, 201)), 0.0)
    num_calls, num_steps = 0, 180
    on_the_way: list[tuple[int, MutatingCall]] = []
    for step in range(num_steps):
        now = step * _STEP_SECONDS
        assert cache.extend(sequence, len(sequence.tokens))
        cache.begin_step([sequence])
        cache.end_step([Computed(sequence, len(sequence.tokens), 7)], now)
        while True:
            while on_the_way and on_the_way[0][0] <= step:
                answer = cache_pb2.AppendResponse(results=[cache_pb2.AppendResult()])
                answer.downlink.counts.add(free=1)
                cache.on_reply(on_the_way.pop(0)[1], answer, now)
            if (call := cache.next_call(list, now)) is None:
                break
            num_calls += 1
            assert isinstance(call.request, cache_pb2.AppendRequest)
            on_the_way.append((step + steps_on_the_way, call))
            if steps_on_the_way:
                break
    assert 0 < num_calls <= num_steps * _STEP_SECONDS / report_seconds
    assert sequence.acked_computed_tokens > num_steps - report_seconds / _STEP_SECONDS - 2 - steps_on_the_way


def test_a_preempted_sequence_comes_back_in_its_next_round() -> None:
    """So that words about the round that ended never mean the one that lives."""
    worker = Worker((8,), (), block_size=1)
    sequence = worker.begin("s", [1], 3)
    again = worker.cache.preempt(sequence)
    assert (again.id, again.round, again.state) == (sequence.id, sequence.round + 1, SequenceState.WAITING)
    worker.methods.clear()
    worker.call(again)
    assert worker.methods[:2] == ["Free", "Allocate"]
    assert worker.manager.sessions[0].sequences[again.id].key.round == again.round


def test_one_call_speaks_for_all_sequences() -> None:
    """Allocate, Append and Free each name all that there is to say: calls must not grow with the batch."""
    worker = Worker((32,), (), block_size=1)
    sequences = [worker.sequence(name, [ord(name)], 3) for name in "abc"]
    worker.call(*sequences)
    assert all(worker.cache.extend(sequence, 1) for sequence in sequences)
    worker.cache.begin_step(sequences)
    worker.cache.end_step([Computed(sequence, 1, 7) for sequence in sequences], worker.now)
    worker.call()
    for sequence in sequences:
        worker.cache.free(sequence)
    worker.call()
    assert {sequence.state for sequence in sequences} == {SequenceState.ENDED}
    assert [worker.methods.count(method) for method in ("Allocate", "Free")] == [1, 1]
    assert worker.methods.count("Append") <= 2, "one of them for the reserve"


def _wishes(cache: EngineCache, *candidates: CacheSequence) -> list[int]:
    """How many blocks for the reserve the Allocate of these sequences asks for."""
    return [wish.num_blocks for wish in _call(cache, "Allocate", *candidates).request.uplink.reserve_wishes]


@pytest.mark.parametrize(
    ("num_blocks", "wish"),
    [
        pytest.param(8, 2, id="a block for each, of five that are left"),
        pytest.param(4, 1, id="one that is left"),
        pytest.param(3, 0, id="none beside the tables"),
        pytest.param(2, 0, id="fewer than the tables want"),
    ],
)
def test_a_head_start_comes_with_the_tables_unless_it_would_take_their_blocks(num_blocks: int, wish: int) -> None:
    """Whose prompt fills its blocks needs another one for the token after its first, before any other call is answered. The
    manager fills the reserve first: it must not be asked for what the tables need."""
    asked = [_sequence(name, [1, 2], 5) for name in "ab"]
    assert _wishes(_cache(block_size=2, num_blocks=num_blocks), *asked) == [wish]
    ends_with_its_first = _sequence("c", [1, 2], 1)
    assert _wishes(_cache(block_size=2, num_blocks=num_blocks), ends_with_its_first) == [0]


def _with_complete_blocks(num_complete: int) -> EngineCache:
    """Blocks 1 … hold the tokens 1, 2 · 3, 4 · … and are in no table."""
    cache = _cache(block_size=2, num_blocks=8)
    fill(cache.state.ledgers[0], 1, *(pack_tokens([2 * block - 1, 2 * block]) for block in range(1, 1 + num_complete)))
    return cache


def test_a_head_start_takes_no_block_that_may_be_a_hit() -> None:
    """The manager fills the reserve before it looks prompts up, and would evict what the very same Allocate comes back for."""
    assert _wishes(_with_complete_blocks(5), _sequence("a", [1, 2, 3], 5)) == [0]


def _table(num_cached_tokens: int, *tables: tuple[list[int], list[int]]) -> cache_pb2.AllocateResponse:
    """The answer to an Allocate of one item."""
    answer = cache_pb2.AllocateResponse()
    granted = answer.results.add().granted
    granted.num_cached_tokens = num_cached_tokens
    for blocks, generations in tables:
        granted.tables.add(block_ids=blocks, generations=generations)
    return answer


def _grant() -> cache_pb2.AllocateResponse:
    answer = _grants([4, 5])
    answer.results[0].granted.num_cached_tokens = 2
    del answer.downlink.entries[0].grant.generations[1]
    return answer


@pytest.mark.parametrize(
    "answer",
    [
        *(pytest.param(_table(count, ([1], [1])), id=f"{count} tokens in one block") for count in (3, 4, 6, 1 << 30)),
        pytest.param(_table(6, ([1, 2, 3], [1, 1, 1])), id="nothing is left to compute"),
        pytest.param(_table(2), id="no table"),
        pytest.param(_table(2, ([1], [1]), ([1], [1])), id="two tables"),
        pytest.param(_table(2, ([1, 4], [1])), id="a block without its generation"),
        pytest.param(_grant(), id="a grant without its generation"),
    ],
)
def test_a_table_that_makes_no_sense_ends_the_session(answer: cache_pb2.AllocateResponse) -> None:
    """Three blocks of two tokens are held here, and the prompt has six tokens."""
    cache, sequence = _with_complete_blocks(3), _sequence("a", [1, 2, 3, 4, 5, 6], 1)
    cache.on_reply(_call(cache, "Allocate", sequence), answer, 0.0)
    assert cache.session == 0, "the session is given up"
    assert sequence.state is SequenceState.WAITING
    assert not cache.state.ledgers[0].num_used

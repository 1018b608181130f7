"""The worker's cache side alone, with hand-made answers: what it says, and how often."""

from __future__ import annotations

import pytest

from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache.engine_cache import Computed, EngineCache
from kvpool.worker_service.cache.ledger import Content
from kvpool.worker_service.cache.link_state import Call
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState, pack_tokens
from kvpool.worker_service.cache.state import CacheSettings

_STEP_SECONDS = 0.001


def _live(cache: EngineCache, max_new_tokens: int) -> CacheSequence:
    """A sequence of one prompt token with its table, and the reserve full of all the blocks that it can need."""
    cache.on_registered(cache_pb2.RegisterResponse(epoch=1, session=1))
    sequence = CacheSequence("s", 1, common_pb2.Root(model_fingerprint="m"), [1], max_new_tokens=max_new_tokens)
    call = cache.next_call(lambda: [sequence], 0.0)
    assert call is not None
    answer = cache_pb2.AllocateResponse()
    answer.results.add().granted.tables.add(block_ids=[1], generations=[1])
    grant = answer.downlink.entries.add(number=1).grant
    count = -(-max_new_tokens // cache.settings.block_size) - 1
    grant.block_ids.extend(range(2, 2 + count))
    grant.generations.extend([1] * count)
    cache.on_reply(call, answer, 0.0)
    assert sequence.state is SequenceState.LIVE
    return sequence


@pytest.mark.parametrize("report_seconds", [0.01, 0.05])
@pytest.mark.parametrize("steps_on_the_way", [0, 1, 5])
def test_calls_grow_with_time_and_not_with_steps(report_seconds: float, steps_on_the_way: int) -> None:
    """Each step fills a block; those of `report_seconds` go out in one call, also where the answer takes longer than a step."""
    cache = EngineCache(CacheSettings(block_size=1, num_blocks=256, report_seconds=report_seconds))
    sequence = _live(cache, 200)
    num_calls, num_steps = 0, 180
    on_the_way: list[tuple[int, Call]] = []
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
    cache = EngineCache(CacheSettings(block_size=1, num_blocks=8))
    sequence = _live(cache, 3)
    again = cache.preempt(sequence)
    assert (again.id, again.round, again.state) == (sequence.id, sequence.round + 1, SequenceState.WAITING)
    free = cache.next_call(lambda: [again], 0.0)
    assert free is not None
    assert isinstance(free.request, cache_pb2.FreeRequest), "the old round is freed before the new one is asked for"
    assert free.request.items[0].update.key.round == sequence.round
    cache.on_reply(free, cache_pb2.FreeResponse(), 0.0)
    call = cache.next_call(lambda: [again], 0.0)
    assert call is not None
    assert isinstance(call.request, cache_pb2.AllocateRequest)
    assert call.request.items[0].key.round == sequence.round + 1


def test_what_a_lost_answer_may_have_granted_is_freed() -> None:
    """The Allocate was executed and its answer lost; then the request ends. The manager holds blocks that only a Free lets go."""
    cache = EngineCache(CacheSettings(block_size=1, num_blocks=8))
    cache.on_registered(cache_pb2.RegisterResponse(epoch=1, session=1))
    sequence = CacheSequence("s", 1, common_pb2.Root(model_fingerprint="m"), [1], max_new_tokens=2)
    call = cache.next_call(lambda: [sequence], 0.0)
    assert call is not None
    cache.on_failure(call, "", 0.0)
    cache.free(sequence)
    free = cache.next_call(list, 10.0)
    assert free is not None
    assert isinstance(free.request, cache_pb2.FreeRequest)
    assert free.request.items[0].update.key.sequence_id == "s"
    cache.on_reply(free, cache_pb2.FreeResponse(), 10.0)
    assert sequence.state is SequenceState.ENDED
    assert cache.is_idle


def test_one_call_speaks_for_all_sequences() -> None:
    """Allocate, Append and Free each name all that there is to say: calls must not grow with the batch."""
    cache = EngineCache(CacheSettings(block_size=1, num_blocks=32, report_seconds=0.0))
    cache.on_registered(cache_pb2.RegisterResponse(epoch=1, session=1))
    root = common_pb2.Root(model_fingerprint="m")
    sequences = [CacheSequence(name, 1, root, [1], max_new_tokens=3) for name in "abc"]
    call = cache.next_call(lambda: sequences, 0.0)
    assert call is not None
    assert isinstance(call.request, cache_pb2.AllocateRequest)
    assert [item.key.sequence_id for item in call.request.items] == ["a", "b", "c"]
    answer = cache_pb2.AllocateResponse()
    for block in (1, 2, 3):
        answer.results.add().granted.tables.add(block_ids=[block], generations=[1])
    grant = answer.downlink.entries.add(number=1).grant
    grant.block_ids.extend(range(4, 10))
    grant.generations.extend([1] * 6)
    cache.on_reply(call, answer, 0.0)
    assert all(cache.extend(sequence, 1) for sequence in sequences)
    cache.begin_step(sequences)
    cache.end_step([Computed(sequence, 1, 7) for sequence in sequences], 0.0)
    call = cache.next_call(list, 0.0)
    assert call is not None
    assert isinstance(call.request, cache_pb2.AppendRequest)
    assert [item.update.key.sequence_id for item in call.request.items] == ["a", "b", "c"]
    cache.on_reply(call, cache_pb2.AppendResponse(results=[cache_pb2.AppendResult()] * 3), 0.0)
    for sequence in sequences:
        cache.free(sequence)
    call = cache.next_call(list, 0.0)
    assert call is not None
    assert isinstance(call.request, cache_pb2.FreeRequest)
    assert [item.update.key.sequence_id for item in call.request.items] == ["a", "b", "c"]


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
    cache = EngineCache(CacheSettings(block_size=2, num_blocks=num_blocks))
    cache.on_registered(cache_pb2.RegisterResponse(epoch=1, session=1))
    root = common_pb2.Root(model_fingerprint="m")
    asked = [CacheSequence(name, 1, root, [1, 2], max_new_tokens=5) for name in "ab"]
    ends_with_its_first = CacheSequence("c", 1, root, [1, 2], max_new_tokens=1)
    call = cache.next_call(lambda: asked, 0.0)
    assert call is not None
    assert [one.num_blocks for one in call.request.uplink.reserve_wishes] == [wish]
    other = EngineCache(CacheSettings(block_size=2, num_blocks=num_blocks))
    other.on_registered(cache_pb2.RegisterResponse(epoch=1, session=1))
    call = other.next_call(lambda: [ends_with_its_first], 0.0)
    assert call is not None
    assert [one.num_blocks for one in call.request.uplink.reserve_wishes] == [0]


def test_a_head_start_takes_no_block_that_may_be_a_hit() -> None:
    """The manager fills the reserve before it looks prompts up, and would evict what the very same Allocate comes back for."""
    cache = EngineCache(CacheSettings(block_size=2, num_blocks=8))
    cache.on_registered(cache_pb2.RegisterResponse(epoch=1, session=1))
    root = common_pb2.Root(model_fingerprint="m")
    ledger = cache._state.ledger
    for block in range(1, 6):
        ledger.accept_grant(block, 1)
        ledger.use(block)
        ledger.complete(block, Content(None, root, bytes(8)))
        ledger.drop(block)
    call = cache.next_call(lambda: [CacheSequence("a", 1, root, [1, 2, 3], max_new_tokens=5)], 0.0)
    assert call is not None
    assert [one.num_blocks for one in call.request.uplink.reserve_wishes] == [0]


def _table(num_cached_tokens: int, *tables: tuple[list[int], list[int]]) -> cache_pb2.AllocateResponse:
    """The answer to an Allocate of one item."""
    answer = cache_pb2.AllocateResponse()
    granted = answer.results.add().granted
    granted.num_cached_tokens = num_cached_tokens
    for blocks, generations in tables:
        granted.tables.add(block_ids=blocks, generations=generations)
    return answer


def _grant() -> cache_pb2.AllocateResponse:
    answer = _table(2, ([1], [1]))
    grant = answer.downlink.entries.add(number=1).grant
    grant.block_ids[:], grant.generations[:] = [4, 5], [1]
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
    cache = EngineCache(CacheSettings(block_size=2, num_blocks=8))
    cache.on_registered(cache_pb2.RegisterResponse(epoch=1, session=1))
    root = common_pb2.Root(model_fingerprint="m")
    ledger = cache._state.ledger
    before = None
    for block in (1, 2, 3):
        ledger.accept_grant(block, 1)
        ledger.use(block)
        before = Content(before, root, pack_tokens([2 * block - 1, 2 * block]))
        ledger.complete(block, before)
        ledger.drop(block)
    sequence = CacheSequence("a", 1, root, [1, 2, 3, 4, 5, 6], max_new_tokens=1)
    call = cache.next_call(lambda: [sequence], 0.0)
    assert call is not None
    cache.on_reply(call, answer, 0.0)
    assert cache.session == 0, "the session is given up"
    assert sequence.state is SequenceState.WAITING
    assert not ledger.num_used

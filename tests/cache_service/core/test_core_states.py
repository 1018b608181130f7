"""Groups of recurrent layers: what a sequence keeps is one state, and a snapshot of it is needed at the end of a hit.

Drawn histories (test_core_state_machine.py) have such groups too, and a model says what is right; here are examples of what windows
(test_core_windows.py) do not have. Blocks have four tokens, the grid two blocks.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.cache_service.core.messages import Boundary, MissCause, Wait
from kvpool.cache_service.core.refusal import Reason, Refusal
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import key, token_bytes
from tests.cache_service.core.test_core_windows import granted_by, served_until

SIZE, GRID = 4, 2


def worker_with_state(num_blocks: tuple[int, int] = (33, 33)) -> Desk:
    """Group 0 sees everything, group 1 has a state."""
    return Desk(num_blocks, SIZE, windows=[(0, 0), (0, 2)], grids=[0, GRID])


def boundaries(desk: Desk, name: str, tokens: Any, **wanted: Any) -> tuple[int, ...]:
    return granted_by(desk, name, tokens, **wanted).boundaries


def test_a_hit_ends_where_there_is_a_snapshot() -> None:
    """All blocks of the prompt are cached; the state after 16 tokens is, that after 24 is not."""
    desk = worker_with_state()
    served_until(desk, "a", range(28), 2, 4)
    granted = granted_by(desk, "b", [*range(24), 99])
    full, state = granted.tables
    assert granted.num_cached_tokens == 16
    assert full.blocks[:4] == (1, 2, 3, 4)
    assert (state.start, len(state.blocks), len(state.scratch)) == (3, 1, 2), "one snapshot, and the two scratch blocks"


def test_a_pool_that_has_no_room_beside_a_snapshot_is_named_with_its_setting() -> None:
    desk = worker_with_state((33, 3))
    (refusal,), _ = desk.manager.allocate(desk.uplink(), [desk.item("a", range(21))])
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.NEVER_FITS
    for words in ("needs 3 of group 1, 2 as scratch and 1 in a snapshot", "'w1' has 2", "--state-blocks"):
        assert words in refusal.message, refusal.message


def test_what_the_item_asks_for_is_rounded_down_and_its_interval_up() -> None:
    desk = worker_with_state()
    assert boundaries(desk, "a", range(33), boundaries=(13, 7, 29)) == (8, 24, 32)
    assert boundaries(desk, "b", range(50, 83), retention_interval=9) == (16, 32)


def test_a_second_prompt_waits_for_the_place_of_the_grid_before_it_parts_and_its_leader_is_told() -> None:
    """The second of the two hits, not the third."""
    desk = worker_with_state()
    granted_by(desk, "a", range(33))
    assert desk.allocate("b", [*range(21), 99]) == Wait(key("a"), 16)
    assert [one.entry for one in desk.session.downlink.pending()] == [Boundary(key("a"), 16)]
    desk.name("a", 4)
    assert granted_by(desk, "b", [*range(21), 99]).num_cached_tokens == 16


def test_two_snapshots_of_one_update_are_each_one_of_its_own() -> None:
    """Neither is the beginning of the other, as with windows: both are kept like any hit."""
    desk = Desk((33, 33), SIZE, windows=[(0, 0), (0, 3)], grids=[0, 1])
    granted_by(desk, "a", range(20))
    first, second = desk.scratch("a")[1:]
    desk.tell(desk.statement("a", 8, bound={0: first, 1: second}))
    assert desk.window("a").ends == {1, 2}
    desk.tell(desk.statement("a", 12, released=[(0, first), (1, second)]))
    assert desk.session.pools[1].demoted() == []


def test_explain_says_that_no_snapshot_was_kept() -> None:
    desk = worker_with_state()
    served_until(desk, "a", range(29), 2)
    (worker,) = desk.manager.explain(ROOT, token_bytes([*range(24), 99])).workers
    assert (worker.num_cached_tokens, worker.miss.cause) == (8, MissCause.SNAPSHOT_NOT_KEPT)
    assert (worker.miss.position, worker.miss.num_passed_tokens) == (8, 24)


def test_explain_says_which_of_window_and_snapshot_is_missing() -> None:
    desk = Desk((33, 33, 33), SIZE, windows=[(0, 0), (6, 5), (0, 2)], grids=[0, 0, GRID])
    served_until(desk, "a", range(29), 2)
    granted_by(desk, "b", range(29))
    scratch = desk.scratch("b", 1)
    desk.tell(desk.statement("b", 28, bound={4: scratch[0], 5: scratch[1]}, group=1))
    desk.free("b", 28)
    (worker,) = desk.manager.explain(ROOT, token_bytes([*range(26), 99])).workers
    assert (worker.num_cached_tokens, worker.miss.cause) == (8, MissCause.SNAPSHOT_NOT_KEPT), "the window is there"
    granted_by(desk, "c", range(50, 79), no_wait=True)
    snapshot = desk.scratch("c", 2)[0]
    desk.tell(desk.statement("c", 28, bound={5: snapshot}, group=2))
    desk.free("c", 28)
    (worker,) = desk.manager.explain(ROOT, token_bytes([*range(50, 76), 99])).workers
    assert (worker.num_cached_tokens, worker.miss.cause) == (0, MissCause.WINDOW_NOT_KEPT), "the snapshot is there"


@pytest.mark.parametrize(
    ("num_tokens", "cause"), [(12, MissCause.PARTIAL_TAIL), (15, MissCause.PARTIAL_TAIL), (16, MissCause.LAST_TOKEN)]
)
def test_what_lies_beyond_the_last_place_of_the_grid_is_a_tail(num_tokens: int, cause: MissCause) -> None:
    """Of sixteen tokens all would be a hit, were it not for the last."""
    desk = worker_with_state()
    served_until(desk, "a", range(29), 2)
    (worker,) = desk.manager.explain(ROOT, token_bytes(range(num_tokens))).workers
    assert (worker.num_cached_tokens, worker.miss.cause) == (8, cause)

"""What bench.step_profile runs next to steps, and how it compares them."""

from __future__ import annotations

from itertools import count

from bench.neighbours import STEPS_PER_TURN, NextTo, busy_programs, measure_turns


def test_busy_programs_run_within_the_context_alone() -> None:
    with busy_programs(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert [process.returncode for process in processes] == [-9, -9]


def test_turns_alternate_and_the_warm_up_does_not_count() -> None:
    done: list[str] = []
    milliseconds = count()
    found = measure_turns(
        lambda: done.append("one"), lambda: done.append("all"), 1, 2, lambda: next(milliseconds) / 1000
    )
    assert done == (["one"] * STEPS_PER_TURN + ["all"] * STEPS_PER_TURN) * 3
    assert len(found.one_thread) == len(found.all_threads) == 2 * STEPS_PER_TURN


def test_a_turn_of_long_steps_is_one_step() -> None:
    seconds = count()
    found = measure_turns(lambda: None, lambda: None, 0, 3, lambda: next(seconds))
    assert found.one_thread == found.all_threads == [1] * 3


def test_the_ratio_is_above_one_if_more_threads_are_slower() -> None:
    assert NextTo(1, [2.0, 1.0, 9.0], [3.0, 3.0, 1.0]).ratio == 1.5

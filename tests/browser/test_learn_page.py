"""The view Learn in a real browser: every story runs to its end and back."""

from __future__ import annotations

import pytest

from kvpool.walkthrough.__main__ import STORIES
from tests.browser.watched import Watched


@pytest.mark.parametrize("name", STORIES)
def test_a_story_runs_to_its_end_and_back_by_the_arrow_keys(watched: Watched, name: str) -> None:
    page = watched.open("learn")
    page.locator(f'[data-story="{name}"]').click()
    page.locator(f'[data-story="{name}"][aria-pressed="true"]').wait_for()
    place = page.locator(".story-place")
    num_steps = int(place.inner_text().split()[3])
    num_blocks = sum(kind.make_group().num_blocks - 1 for kind in STORIES[name].layout)
    titles = []
    for number in range(1, num_steps + 1):
        assert place.inner_text().startswith(f"step {number} of {num_steps}")
        titles.append(page.locator("kvpool-learn h2").inner_text())
        assert page.locator(".story-block").count() == num_blocks
        page.keyboard.press("ArrowRight")
    assert len(set(titles)) == num_steps
    assert place.inner_text().startswith(f"step {num_steps} of")
    for title in reversed(titles):
        assert page.locator("kvpool-learn h2").inner_text() == title
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("End")
    assert page.locator("kvpool-learn h2").inner_text() == titles[-1]
    page.keyboard.press("Home")
    assert page.locator("kvpool-learn h2").inner_text() == titles[0]


def test_each_group_has_its_blocks_tables_and_free_list(watched: Watched) -> None:
    page = watched.open("learn")
    page.locator('[data-story="window"]').click()
    page.locator('[data-story="window"][aria-pressed="true"]').wait_for()
    page.get_by_role("button", name="Next").click()
    full, window = (page.locator(".story-group").nth(number) for number in (0, 1))
    assert [full.locator(".story-block").count(), window.locator(".story-block").count()] == [16, 8]
    assert full.locator(".story-block.scratch").count() == 0
    assert window.locator(".story-block.scratch").count() == 3
    assert window.locator(".story-block.scratch .story-words").all_inner_texts() == ["", "", ""]
    assert window.get_by_label("block 4, held, sealed, lived an old wise").count() == 1
    (row,) = window.locator(".story-tables li").all_inner_texts()
    assert "entry 1 is block 4 · entry 2 is block 3 · scratch 1, 2, 5" in row


def test_a_reload_shows_the_same_step(watched: Watched) -> None:
    page = watched.open("learn")
    page.locator('[data-story="sharing"]').click()
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Next").click()
    title = page.locator("kvpool-learn h2").inner_text()
    page.reload()
    page.locator("kvpool-learn h2", has_text=title).wait_for()

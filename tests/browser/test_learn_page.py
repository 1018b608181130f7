"""The view Learn in a real browser: every story runs to its end and back."""

from __future__ import annotations

import pytest

from scripts.stories import stories
from tests.browser.watched import Watched

NAMES = sorted(name.removesuffix(".json") for name in stories())


@pytest.mark.parametrize("name", NAMES)
def test_a_story_runs_to_its_end_and_back_by_the_arrow_keys(watched: Watched, name: str) -> None:
    page = watched.open("learn")
    page.locator(f'[data-story="{name}"]').click()
    page.locator(f'[data-story="{name}"][aria-pressed="true"]').wait_for()
    place = page.locator(".story-place")
    num_steps = int(place.inner_text().split()[3])
    titles = []
    for number in range(1, num_steps + 1):
        assert place.inner_text().startswith(f"step {number} of {num_steps}")
        titles.append(page.locator("kvpool-learn h2").inner_text())
        assert page.locator(".story-block").count() == 16
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


def test_a_reload_shows_the_same_step(watched: Watched) -> None:
    page = watched.open("learn")
    page.locator('[data-story="sharing"]').click()
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Next").click()
    title = page.locator("kvpool-learn h2").inner_text()
    page.reload()
    page.locator("kvpool-learn h2", has_text=title).wait_for()

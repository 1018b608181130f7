"""The view Prefixes in a real browser."""

from __future__ import annotations

import re

from tests.browser.served import Served
from tests.browser.watched import Watched


def test_the_tree_unfolds_by_keyboard_and_shows_what_was_saved(watched: Watched, served: Served) -> None:
    common = "shelves of this old library hold books that nobody has read for years "
    for end in ("and more of them in the cellar", "yet every night a light is on", "yet every night a light is on"):
        served.generate(common * 2 + end)
    page = watched.open("prefixes")
    entry = page.locator('[role="treeitem"]', has_text="shelves").first
    entry.wait_for()
    entry.focus()
    page.keyboard.press("ArrowRight")
    entry.locator("[role=treeitem]").first.wait_for()  # below this one: other entries may be unfolded already
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "2"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "1"
    served.generate(common * 2 + "yet every night a light is on")
    page.locator(".prefix-facts", has_text=re.compile(r"[1-9][\d,]* saved")).first.wait_for()

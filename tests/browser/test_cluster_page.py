"""The page in a real browser: what every view must do, and the view Cluster."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.browser.served import WORKERS, Served
from tests.browser.watched import Watched

VIEWS = ("cluster", "blocks", "prefixes", "requests", "chat", "why", "learn")


def test_the_cluster_shows_each_worker_with_its_counts(watched: Watched, served: Served) -> None:
    served.generate("what does the cache hold")
    page = watched.open("cluster")
    described = served.run(served.client.describe())
    for worker in described.workers:
        card = page.locator(f'[data-worker="{worker.worker_id}"]')
        card.wait_for()
        words = f"cached {round(100 * worker.counts[0].cached / worker.counts[0].capacity)} %"
        card.locator(".bar-words", has_text=words).wait_for()
    assert page.locator(".worker").count() == len(WORKERS)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [1200, 360])
def test_axe_finds_nothing_serious(watched: Watched, view: str, scheme: str, width: int) -> None:
    watched.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    watched.page.set_viewport_size({"width": width, "height": 740})
    page = watched.open(view)
    page.wait_for_function("document.querySelector('main h1') !== null")
    page.wait_for_load_state("load")
    found = Axe().run(page).response["violations"]
    serious = [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]
    assert serious == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_view_is_reached_by_keyboard(watched: Watched) -> None:
    page = watched.open("cluster")
    titles = page.locator("#tabs a").all_inner_texts()
    assert len(titles) >= 2
    for title in titles:
        page.locator("#skip").focus()
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == title:
                break
        page.keyboard.press("Enter")
        page.wait_for_function("title => document.title.startsWith(title)", arg=title)
    assert page.evaluate("document.activeElement.id") in ("view", "tabs") or len(titles) == 1


def test_a_drain_asks_first_and_can_be_cancelled(watched: Watched, served: Served) -> None:
    page = watched.open("cluster")
    button = page.get_by_role("button", name="Drain worker-0")
    for _ in range(2):
        button.click()
        dialog = page.get_by_role("dialog")
        dialog.wait_for()
        assert page.evaluate("document.activeElement.textContent") == "Cancel"
        page.keyboard.press("Escape")
        dialog.wait_for(state="detached")
    assert not any(worker.draining for worker in served.run(served.client.describe()).workers)

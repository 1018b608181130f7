"""What the page shows when a worker or the manager is killed."""

from __future__ import annotations

from playwright.sync_api import Page

from tests.browser.served import WORKERS, Served
from tests.browser.watched import Watched
from tests.cluster.cluster import MANAGER

SHOWN = "[...document.querySelectorAll('.worker')].map(card => card.dataset.worker)"


def until_shown(page: Page, workers: list[str]) -> None:
    """Until these workers are on the page, and no other."""
    page.wait_for_function(f"wanted => JSON.stringify({SHOWN}) === JSON.stringify(wanted)", arg=workers)


def test_a_worker_that_is_killed_leaves_the_page_and_comes_back(watched: Watched, served: Served) -> None:
    page = watched.open("cluster")
    until_shown(page, list(WORKERS))
    served.cluster.processes[WORKERS[1]].kill()
    until_shown(page, [WORKERS[0]])
    served.cluster.start_worker(WORKERS[1])
    served.run(served.cluster.until_registered(*WORKERS))
    until_shown(page, list(WORKERS))


def test_a_manager_that_is_killed_is_reported_and_the_page_recovers(watched: Watched, served: Served) -> None:
    page = watched.open("cluster")
    until_shown(page, list(WORKERS))
    served.cluster.processes[MANAGER].kill()
    page.locator("#live[data-state=away]").wait_for()
    assert "what is shown here is old" in page.locator("#banner").inner_text()
    until_shown(page, list(WORKERS))
    served.run(served.cluster.start_manager())
    page.locator("#live[data-state=up]").wait_for()
    assert page.locator("#banner").is_hidden()
    served.run(served.cluster.until_registered(*WORKERS))
    until_shown(page, list(WORKERS))

"""A real browser before a real cluster. Only `make test SUITE=browser` runs these tests: they need Chromium and Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest

from tests.browser.served import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.watched import Watched

CHROMIUM: Final = ("chromium", "chromium-browser", "google-chrome")

collect_ignore_glob = [] if os.environ.get("TEST_SUITE") == "browser" else ["test_*.py"]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Shared by all tests of the page; each leaves two workers and a manager that serve."""
    served = Served(tmp_path_factory.mktemp("browser"))
    served.start()
    yield served
    served.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    path = next(filter(None, map(shutil.which, [os.environ.get("CHROMIUM", ""), *CHROMIUM])), None)
    assert path is not None, "no Chromium: apt-get install chromium, or name its program in CHROMIUM"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def watched(browser: Browser, served: Served) -> Iterator[Watched]:
    """A page; in the end it has complained of nothing and has asked nobody but the gateway."""
    from tests.browser.watched import Watched

    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(60_000)
    watched = Watched(context.new_page(), served.url)
    yield watched
    context.close()
    assert watched.complaints == []
    assert watched.foreign == []

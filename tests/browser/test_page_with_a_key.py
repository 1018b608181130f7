"""A gateway with a key, as a person meets it in a browser: alone, and with a proxy that has TLS before it."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from pydantic import SecretStr

from kvpool.gateway.server import GatewayServer
from kvpool.gateway.settings import GatewaySettings
from tests.browser.served import WORKERS, Served
from tests.browser.test_cluster_page import VIEWS
from tests.browser.test_page_and_faults import until_shown
from tests.browser.tls_proxy import tls_proxy

KEY = "a-key-of-this-test"


class Guarded(NamedTuple):
    """Where a gateway with a key is reached."""

    alone: str
    through_proxy: str
    through_proxy_with_its_own_host: str


@pytest.fixture(scope="module")
def guarded(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Before the cluster that all tests of the page share."""
    stack = AsyncExitStack()

    async def start() -> Guarded:
        gateway = GatewayServer(GatewaySettings(manager=served.cluster.address(), port=0, api_key=[SecretStr(KEY)]))
        await stack.enter_async_context(gateway)
        proxies = [
            await stack.enter_async_context(
                tls_proxy(tmp_path_factory.mktemp("tls"), gateway.port, keeps_host=keeps_host)
            )
            for keeps_host in (True, False)
        ]
        return Guarded(f"http://localhost:{gateway.port}", *proxies)

    yield served.run(start())
    served.run(stack.aclose())


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser without cookies, which takes the proxy's own certificate."""
    context = browser.new_context(ignore_https_errors=True)
    context.set_default_timeout(60_000)
    yield context
    context.close()


@pytest.fixture
def other_site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A site that is not the gateway's, and the folder of its files."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://other.localhost:{server.server_port}", tmp_path
        server.shutdown()
        serving.join()


def log_in(page: Page, url: str) -> None:
    """Until the page is live."""
    page.goto(url)
    page.get_by_label("API key of this gateway").fill(KEY)
    page.get_by_role("button", name="Log in").click()
    page.locator("#live[data-state=up]").wait_for()


def press(page: Page, button: str) -> int:
    """Press a button that writes; the status of the answer to it."""
    with page.expect_response(lambda answer: answer.request.method == "POST") as answered:
        page.get_by_role("button", name=button).click()
    status: int = answered.value.status
    return status


@pytest.mark.parametrize("way", Guarded._fields)
def test_a_person_logs_in_looks_drains_a_worker_and_logs_out(
    guarded: Guarded, served: Served, context: BrowserContext, way: str
) -> None:
    url, page = getattr(guarded, way), context.new_page()
    page.goto(url)
    expect(page).to_have_url(f"{url}/login")
    page.get_by_label("API key of this gateway").fill("another-key")
    assert press(page, "Log in") == 401
    expect(page.get_by_role("alert")).to_have_text("This is not one of the gateway's keys.")
    log_in(page, url)
    refused: list[str] = []
    page.on(
        "response", lambda answer: refused.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None
    )
    until_shown(page, list(WORKERS))
    for view in VIEWS:
        page.goto(f"{url}/#/{view}")
        page.locator("#view h1").wait_for()
    page.goto(f"{url}/#/why")
    page.get_by_label("Prompt").fill("what is cached of this")
    assert press(page, "Explain") == 200
    page.goto(f"{url}/#/cluster")
    page.get_by_role("button", name=f"Drain {WORKERS[1]}").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    until_shown(page, [WORKERS[0]])
    assert served.run(served.cluster.processes[WORKERS[1]].ended()) == 0
    served.cluster.start_worker(WORKERS[1])
    served.run(served.cluster.until_registered(*WORKERS))
    assert refused == []
    assert press(page, "Log out") == 303
    expect(page).to_have_url(f"{url}/login")
    assert context.cookies() == []
    page.goto(url)
    expect(page).to_have_url(f"{url}/login")


def test_a_page_whose_session_has_ended_asks_for_the_key(guarded: Guarded, context: BrowserContext) -> None:
    page = context.new_page()
    log_in(page, guarded.alone)
    context.clear_cookies()
    page.get_by_role("link", name="Why?").click()
    expect(page).to_have_url(f"{guarded.alone}/login")


def test_a_link_from_another_site_finds_the_session(
    guarded: Guarded, context: BrowserContext, other_site: tuple[str, Path]
) -> None:
    """Browsers send no SameSite=Strict cookie with it; without a session it leads to the form as ever."""
    (origin, folder), page = other_site, context.new_page()
    (folder / "link.html").write_text(f'<a href="{guarded.alone}/">to the cluster</a>')
    page.goto(f"{origin}/link.html")
    page.get_by_role("link").click()
    expect(page).to_have_url(f"{guarded.alone}/login")
    log_in(page, guarded.alone)
    page.goto(f"{origin}/link.html")
    page.get_by_role("link").click()
    page.locator("#live[data-state=up]").wait_for()


@pytest.mark.parametrize("frame", ["{form}", "<iframe sandbox='allow-forms' srcdoc='{form}'></iframe>"])
def test_a_form_of_another_site_changes_nothing(
    guarded: Guarded, context: BrowserContext, other_site: tuple[str, Path], frame: str
) -> None:
    """With its own origin, and with none (null) out of a sandbox: it can neither log a person in nor out."""
    (origin, folder), page = other_site, context.new_page()
    log_in(page, guarded.alone)
    form = '<form method="post" action="{url}/login"><input name="key" value="{key}"><button>x</button></form>'
    (folder / "form.html").write_text(frame.format(form=form.format(url=guarded.alone, key=KEY)))
    page.goto(f"{origin}/form.html")
    button = page.frame_locator("iframe").locator("button") if "iframe" in frame else page.locator("button")
    with page.expect_response(f"{guarded.alone}/login") as answered:
        button.click()
    assert answered.value.status == 403
    assert "set-cookie" not in answered.value.all_headers()
    page.goto(guarded.alone)
    page.locator("#live[data-state=up]").wait_for()

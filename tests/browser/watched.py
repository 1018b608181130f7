"""A page of the browser, and what it says and asks for."""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.sync_api import ConsoleMessage, Page, Request


class Watched:
    """A page whose complaints and requests are written down."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._on_request)

    def open(self, view: str) -> Page:
        """Show a view, and wait until it is live."""
        self.page.goto(f"{self.url}/#/{view}")
        self.page.locator("#live[data-state=up]").wait_for()
        if view in ("chat", "why"):
            self.page.locator(f"#{view}-model option").first.wait_for(state="attached")
        return self.page

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def _on_request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc and not request.url.startswith("data:"):
            self.foreign.append(request.url)

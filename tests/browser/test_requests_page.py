"""The view Requests in a real browser."""

from __future__ import annotations

import re

import httpx

from tests.browser.served import Served
from tests.browser.watched import Watched


def answer(served: Served, prompt: str, max_tokens: int = 4) -> str:
    """One completion over HTTP; returns its request id."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    response = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.headers["x-request-id"])


def test_an_answer_has_a_lane_and_says_why_it_was_not_cached(watched: Watched, served: Served) -> None:
    page = watched.open("requests")
    answer(served, "a request for the view of requests")
    request_id = answer(served, "a request for the view of requests")
    row = page.locator(".request", has_text=request_id[:8])
    row.filter(has_text="reached its length limit").wait_for()
    assert page.locator(".request").first.inner_text() == row.inner_text()
    lane = row.locator(".lane")
    words = lane.get_attribute("aria-label") or ""
    assert re.fullmatch(r"waiting [\d,.]+ m?s(, \w+ [\d,.]+ m?s on worker-[01])+", words), words
    assert "decode" in words
    widths = lane.locator("span").evaluate_all("parts => parts.map((part) => part.getBoundingClientRect().width)")
    assert all(width > 0 for width in widths)
    cached = row.get_by_text("prompt tokens cached").inner_text()
    assert re.fullmatch(r"(?!0)\d+ of 34 prompt tokens cached", cached), cached
    row.locator("summary").focus()
    page.keyboard.press("Enter")
    row.locator(".sentences li").first.wait_for()


def test_what_comes_another_way_is_shown_as_far_as_the_manager_knows(watched: Watched, served: Served) -> None:
    page = watched.open("requests")

    async def ask() -> str:
        stream = served.client.generate("another way to ask", max_tokens=100, ignore_eos=True)
        await stream.collect()
        return stream.sequence_id

    sequence_id = served.run(ask())
    others = page.get_by_role("list", name="Answers that came another way")
    lane = others.locator(f'[data-sequence="{sequence_id}"]')
    lane.filter(has_text="ended").wait_for()
    assert "decode" in (lane.locator(".lane").get_attribute("aria-label") or "")
    assert (
        page.get_by_role("list", name="Answers of this gateway").locator(f'[data-sequence="{sequence_id}"]').count()
        == 0
    )


def test_a_running_answer_is_shown_and_then_that_its_reader_has_left(watched: Watched, served: Served) -> None:
    page = watched.open("requests")
    body = {"prompt": "a long one", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        row = page.locator(".request", has_text=response.headers["x-request-id"][:8])
        row.filter(has_text="running").wait_for()
    row.filter(has_text="left by its reader").wait_for()

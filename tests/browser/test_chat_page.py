"""The view Chat in a real browser."""

from __future__ import annotations

import re

from playwright.sync_api import Locator

from tests.browser.watched import Watched


def ask(pane: Locator, question: str) -> tuple[int, int]:
    """Ask, and wait for the end; returns how many tokens of the prompt were not computed, and how many it has."""
    asked_before = pane.locator(".prompt-tokens").count()
    pane.locator("textarea").fill(question)
    pane.get_by_role("button", name="Send").click()
    caption = pane.locator(".prompt-tokens summary").nth(asked_before)
    caption.filter(has_text="computed").wait_for()
    pane.get_by_role("button", name="Stop").wait_for(state="hidden")
    words = caption.inner_text().replace(",", "")
    if found := re.fullmatch(r"(\d+) of (\d+) tokens were not computed.*", words):
        return int(found[1]), int(found[2])
    every = re.fullmatch(r"All (\d+) tokens were computed", words)
    assert every is not None, words
    return 0, int(every[1])


def test_the_second_chat_is_served_what_the_first_has_computed(watched: Watched) -> None:
    page = watched.open("chat")
    page.locator("#chat-system").fill("one system prompt that both chats begin with, and that nobody had before")
    first, second = page.locator(".pane").first, page.locator(".pane").last
    ask(first, "who are you")
    num_cached, num_prompt = ask(second, "when do you open")
    assert 0 < num_cached < num_prompt
    second.locator(".token.cached").first.wait_for()
    assert second.locator(".token").count() == num_prompt
    assert second.locator(".token.cached").count() == num_cached
    assert second.locator(".token.cached + .token:not(.cached)").count() == 1
    assert second.locator(".answer").inner_text() != ""
    num_cached, _ = ask(second, "and on sundays")
    assert num_cached >= num_prompt - 4, "the first turn is the prefix of the second"


def test_an_answer_that_is_stopped_leaves_the_chat_ready(watched: Watched) -> None:
    page = watched.open("chat")
    pane = page.locator(".pane").first
    page.locator("#chat-longest").fill("600")
    pane.locator("textarea").fill("tell me everything")
    pane.locator("textarea").press("Enter")
    pane.get_by_role("button", name="Stop").click()
    pane.get_by_text("Stopped.").wait_for()
    page.locator("#chat-longest").fill("5")
    assert ask(pane, "and now")[1] > 0


def test_an_error_is_shown_in_words(watched: Watched) -> None:
    """A prompt that is too long is refused; the page says why. The browser itself reports the answer 400."""
    page = watched.open("chat")
    page.evaluate("document.querySelector('#chat-system').value = 'long '.repeat(60000)")
    pane = page.locator(".pane").first
    pane.locator("textarea").fill("too long")
    pane.locator("textarea").press("Enter")
    pane.get_by_text("No answer:").wait_for()
    assert [complaint for complaint in watched.complaints if "400" not in complaint] == []
    watched.complaints.clear()

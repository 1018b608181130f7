"""The view Why? in a real browser, and the same question in a chat."""

from __future__ import annotations

from tests.browser.served import BLOCK_SIZE, Served
from tests.browser.watched import Watched


def test_a_prompt_that_is_cached_is_served_up_to_its_last_block(watched: Watched, served: Served) -> None:
    prompt = "a prompt for the view that explains why it missed"
    page = watched.open("why")
    page.locator("#why-prompt").fill(prompt)
    for cached in (False, True):
        page.get_by_role("button", name="Explain").click()
        tail = "always computed" if len(prompt) % BLOCK_SIZE == 0 else "does not fill a block"
        words = tail if cached else "never seen"
        page.locator(".sentences", has_text=words).wait_for()
        served.generate(prompt)
    page.get_by_role("button", name="Explain").click()
    page.locator(".sentences").wait_for()
    most = max(int(text.replace(",", "")) for text in page.locator(".served td:nth-child(2)").all_inner_texts())
    assert most == served.generate(prompt)


def test_a_chat_says_why_it_was_not_served_more(watched: Watched) -> None:
    """The state before the request: its own blocks are no hits of its own."""
    page = watched.open("chat")
    page.locator("#chat-system").fill("zebras that nobody has ever asked about")
    page.locator("#chat-longest").fill("3")
    pane = page.locator(".pane").first
    pane.locator("textarea").fill("what is it")
    pane.locator("textarea").press("Enter")
    pane.locator(".why summary").click()
    pane.locator(".why .sentences li").first.wait_for()
    pane.locator(".prompt-tokens summary", has_text="computed").wait_for()

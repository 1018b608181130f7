"""The view Blocks in a real browser."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page

from kvpool.client.block_map import fetch_block_map
from kvpool.v1 import cache_pb2
from tests.browser.served import NUM_BLOCKS, WORKERS, Served
from tests.browser.watched import Watched

PIXELS = """() => {
  const canvas = document.querySelector('.map-cells');
  return [...new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)];
}"""
"""Colours of all cells, from block 1 on, as 0xAABBGGRR."""
COLOURS = """async () => {
  const { STATES } = await import('/static/block-states.js');
  const { colourOf } = await import('/static/blocks/colours.js');
  return STATES.map(({ css }) => colourOf(css));
}"""
LIT = """async () => {
  const { colourOf } = await import('/static/blocks/colours.js');
  return [colourOf('--lit'), colourOf('--related')];
}"""
STORED = """async (name) => {
  const { store } = await import('/static/store.js');
  const [pool] = store.workerNamed(name).pools;
  return JSON.stringify({ states: [...pool.states], refs: [...pool.refCounts] });
}"""


def described(served: Served, worker_id: str) -> dict[int, tuple[int, int]]:
    """State and reference count of each block, as Describe gives them."""
    blocks = served.run(fetch_block_map(served.client, worker_id)).blocks
    return {block.block_id: (block.state, block.ref_count) for block in blocks if block.block_id}


def seen(page: Page, worker_id: str) -> dict[int, tuple[int, int]]:
    """The same, as the page has it."""
    stored: dict[str, Any] = json.loads(page.evaluate(STORED, worker_id))
    return {block: (stored["states"][block], stored["refs"][block]) for block in range(1, len(stored["states"]))}


def busiest(served: Served) -> str:
    """The worker that has computed most."""
    workers = served.run(served.client.describe()).workers
    return max(workers, key=lambda worker: worker.counts[0].cached).worker_id


def until_equal(page: Page, served: Served, worker_id: str) -> None:
    """Until the page has what Describe says; a picture may be on its way."""
    for _ in range(100):
        if seen(page, worker_id) == described(served, worker_id):
            return
        page.wait_for_timeout(100)
    assert seen(page, worker_id) == described(served, worker_id)


def test_cells_have_the_states_that_describe_gives(watched: Watched, served: Served) -> None:
    watched.page.emulate_media(reduced_motion="reduce")
    page = watched.open("blocks")
    for number in range(6):
        served.generate(f"a prompt with number {number} and some words that follow", max_tokens=20)
    colours = page.evaluate(COLOURS)
    assert len(set(colours[1:])) == len(colours) - 1
    for name in WORKERS:
        page.locator("#blocks-worker").select_option(name)
        until_equal(page, served, name)
        page.wait_for_timeout(300)
        truth = described(served, name)
        assert len(truth) == NUM_BLOCKS - 1
        shown = page.evaluate(PIXELS)[: len(truth)]
        assert shown == [colours[truth[block][0]] for block in sorted(truth)]
    states = {state for name in WORKERS for state, _ in described(served, name).values()}
    assert {cache_pb2.BLOCK_STATE_CACHED, cache_pb2.BLOCK_STATE_FREE} <= states


def test_a_map_that_was_open_all_the_time_shows_what_a_new_one_shows(watched: Watched, served: Served) -> None:
    page = watched.open("blocks")
    for number in range(4):
        served.generate(f"{number} is another number and has other words after it", max_tokens=30)
    for name in WORKERS:
        until_equal(page, served, name)


def test_keys_move_over_the_map_and_light_up_a_prefix(watched: Watched, served: Served) -> None:
    prompt = "the quick brown fox jumps over the lazy dog again and again"
    served.generate(prompt)
    name = busiest(served)
    page = watched.open(f"blocks?worker={name}")
    until_equal(page, served, name)
    deep = max(
        (block for block in served.run(fetch_block_map(served.client, name)).blocks if block.sealed),
        key=lambda block: block.table_index,
    )
    page.locator(".map").focus()
    page.keyboard.press("Home")
    for _ in range(deep.block_id - 1):
        page.keyboard.press("ArrowRight")
    details = page.get_by_role("status", name="The block")
    details.get_by_role("heading", name=f"Block {deep.block_id}").wait_for()
    assert details.locator("mark").inner_text() != ""
    page.keyboard.press("Enter")
    page.get_by_text(f"Lit: the {deep.table_index + 1} blocks").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Lit: the").wait_for(state="detached")


def test_a_shared_block_lights_up_all_who_share_it(watched: Watched, served: Served) -> None:
    watched.page.emulate_media(reduced_motion="reduce")
    page = watched.open("blocks")
    prompt = "a prompt whose beginning two running sequences share"
    served.generate(prompt)
    streams = [served.client.generate(prompt + end, max_tokens=700, ignore_eos=True) for end in ("!", "?")]

    async def begin() -> set[str]:
        return {(await anext(stream)).worker_id for stream in streams}

    async def end() -> None:
        for stream in streams:
            await stream.aclose()

    [name] = served.run(begin())
    shared = [b for b in served.run(fetch_block_map(served.client, name)).blocks if b.ref_count == len(streams)]
    deepest = max(shared, key=lambda block: block.table_index)
    page.locator("#blocks-worker").select_option(name)
    page.locator(".map").focus()
    page.keyboard.press("Home")
    for _ in range(deepest.block_id - 1):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.get_by_text("2 sequences hold it, and in green their").wait_for()
    page.wait_for_timeout(300)
    lit, related = page.evaluate(LIT)
    shown = page.evaluate(PIXELS)
    assert shown.count(lit) == deepest.table_index + 1
    assert shown.count(related) >= len(streams)
    served.run(end())


def test_the_pointer_asks_for_a_block(watched: Watched, served: Served) -> None:
    page = watched.open("blocks")
    page.locator(".map-cells").hover(position={"x": 3, "y": 3})
    page.get_by_role("heading", name="Block 1 ·").wait_for()


def test_every_colouring_has_a_legend_that_counts_all_blocks(watched: Watched) -> None:
    page = watched.open("blocks")
    for title in ("sharing", "age", "tenant's salt", "state"):
        page.get_by_role("button", name=title, exact=True).click()
        legend = page.locator(".legend button:visible")
        counts = [int(text.replace(",", "")) for text in legend.locator(".legend-count").all_inner_texts()]
        assert sum(counts) == NUM_BLOCKS - 1
        legend.first.click()
        assert legend.first.get_attribute("aria-pressed") == "true"
        legend.first.click()
        assert legend.first.get_attribute("aria-pressed") == "false"

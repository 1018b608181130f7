"""How long the page's map of blocks takes for a frame: `python -m bench.page_frames`. Needs Chromium and Playwright.

The page is the real one, with a pool of --blocks blocks of which --changes change in each picture, five times a second, and glow. A
frame's time is what the page computes and hands to the canvas; what the browser itself does afterwards is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
from collections.abc import AsyncGenerator

import numpy as np
import uvicorn
from playwright.async_api import async_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvpool.gateway.pages.event_stream import PageEvents
from kvpool.gateway.pages.files import file_routes
from kvpool.gateway.pages.hub import Hub, PageViewer
from kvpool.gateway.server import listen
from kvpool.v1 import cache_pb2, common_pb2

INTERVAL_SECONDS = 0.2


async def pictures(num_blocks: int, num_changes: int) -> AsyncGenerator[cache_pb2.Picture, None]:
    """A whole picture, then changes for ever."""
    draw = random.Random(1)
    worker = cache_pb2.WorkerDescription(
        worker_id="worker-0",
        counts=[common_pb2.BlockCounts(capacity=num_blocks - 1)],
        kv_cache_config=common_pb2.KVCacheConfig(
            block_size=16, pools=[common_pb2.KVCachePool(tier=common_pb2.TIER_DEVICE, num_blocks=num_blocks)]
        ),
    )
    number = 0
    while True:
        number += 1
        whole = number == 1
        ids = range(num_blocks) if whole else sorted(draw.sample(range(1, num_blocks), num_changes))
        blocks = cache_pb2.BlockPicture(
            tier=common_pb2.TIER_DEVICE,
            block_ids=ids,
            states=bytes(draw.randint(1, 3) for _ in ids),
            ref_counts=np.array([draw.randint(0, 9) for _ in ids], "<u2").tobytes(),
            last_used=np.full(len(ids), number, "<u4").tobytes(),
            salt_numbers=np.array([draw.randint(0, 9) for _ in ids], "<u2").tobytes(),
        )
        change = cache_pb2.WorkerPicture(session=1, worker=worker if whole else None, blocks=[blocks])
        yield cache_pb2.Picture(epoch=1, number=number, whole=whole, complete=True, workers=[change])
        await asyncio.sleep(INTERVAL_SECONDS)


async def measure(num_blocks: int, num_changes: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of frames, by what colours the cells."""
    hub = Hub(lambda: pictures(num_blocks, num_changes))

    async def watch(request: Request) -> Response:
        return PageEvents(hub.events(PageViewer(include_blocks=True, pause_seconds=0)))

    listener = listen("127.0.0.1", 0)
    app = Starlette(routes=[Route("/api/watch", watch), *file_routes(has_login=False)])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve([listener]))
    found: dict[str, list[float]] = {}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = await browser.new_page(viewport={"width": 1200, "height": 800})
        for colouring in ("state", "sharing", "age", "salt"):
            await page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/#/blocks?colour={colouring}")
            await page.locator("#live[data-state=up]").wait_for()
            await page.evaluate("document.querySelector('kvpool-blocks').map.frameTimes.length = 0")
            await asyncio.sleep(seconds)
            found[colouring] = await page.evaluate("document.querySelector('kvpool-blocks').map.frameTimes")
        await browser.close()
    server.should_exit = True
    await serving
    await hub.close()
    return found


def main() -> None:
    """Print a line for each colouring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_001)
    parser.add_argument("--changes", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    for colouring, times in asyncio.run(measure(arguments.blocks, arguments.changes, arguments.seconds)).items():
        ordered = sorted(times)
        p95 = ordered[int(0.95 * (len(ordered) - 1))]
        print(
            f"{arguments.blocks - 1:,} cells, {arguments.changes:,} changes a picture, by {colouring:8}: {len(times)} frames, "
            f"median {statistics.median(ordered):.1f} ms, p95 {p95:.1f} ms, longest {ordered[-1]:.1f} ms"
        )


if __name__ == "__main__":
    main()

"""The picture of the live page in the docs, taken from a gateway that runs: `python -m scripts.page_picture http://127.0.0.1:8000`.

Start a cluster with `kvpool up --http 8000` first, and give it something to do. Needs Chromium and `.[browser]`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "page.png"
BUSIEST = """async () => {
  const { store } = await import('/static/store.js');
  const workers = store.sortedWorkers();
  const idle = ({ info }) => info.counts.free / info.counts.capacity;
  return workers.sort((a, b) => idle(a) - idle(b))[0].info.worker_id;
}"""


def main() -> None:
    """Open the view Blocks of the busiest worker, point at a block that is shared, and light up its prefix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 640}, color_scheme="light")
        page.goto(f"{arguments.url}/#/blocks")
        page.locator("#live[data-state=up]").wait_for()
        worker = page.evaluate(BUSIEST)
        page.locator("#blocks-worker").select_option(worker)
        page.wait_for_timeout(2000)
        shared = page.evaluate(
            "name => import('/static/store.js').then(({store}) => { const refs = store.workerNamed(name).refCounts;"
            " let best = 1; refs.forEach((count, block) => { if (count >= refs[best]) best = block; }); return best; })",
            worker,
        )
        page.evaluate("block => document.querySelector('kvpool-blocks').map.focus(block)", shared)
        page.evaluate("block => document.querySelector('kvpool-blocks').map.select(block)", shared)
        page.get_by_text("Lit: the").wait_for()
        page.wait_for_timeout(1200)
        page.screenshot(path=arguments.out)
        browser.close()
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

"""The stories of the page Learn, as the manager's real core and a worker's real cache side play them; index.json lists them.

`python -m scripts.stories` writes them, with --check it only compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from kvpool.walkthrough.__main__ import STORIES
from kvpool.walkthrough.recording import as_object, record

FOLDER: Final = Path(__file__).parents[1] / "gateway" / "static" / "stories"


def stories() -> dict[str, str]:
    """The content of each file by its name."""
    files, listed = {}, []
    for name, story in STORIES.items():
        told = as_object(story, record(story))
        broken = [step["title"] for step in told["steps"] if step["violations"]]
        assert not broken, f"the story {name} breaks a law at {broken}"
        files[f"{name}.json"] = _json(told)
        listed.append({"name": name, "summary": story.summary})
    return {**files, "index.json": _json(listed)}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def committed() -> dict[str, str]:
    """What is there."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.json"))}


def main() -> int:
    """Write, or compare; returns the exit status."""
    made = stories()
    if "--check" in sys.argv[1:]:
        if committed() == made:
            return 0
        print("gateway/static/stories differs from what the core does: run `make docs` and commit", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    for name in committed().keys() - made.keys():
        (FOLDER / name).unlink()
    for name, content in made.items():
        (FOLDER / name).write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

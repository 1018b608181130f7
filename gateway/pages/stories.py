"""Serves GET /api/stories: the stories of the page Learn, which `make docs` has recorded from the manager's core."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse

_FIRST: Final = ("pool", "sharing", "allocation", "prefix", "chain", "eviction", "window", "state", "fork")
"""Stories in the order in which they are best read; others follow by name."""


async def stories(request: Request) -> JSONResponse:
    """Answer with name, summary and number of steps of each story."""
    return JSONResponse({"stories": found_stories()})


@cache
def found_stories() -> list[dict[str, str | int]]:
    """Read all stories of the package."""
    folder = files("kvpool.gateway") / "static" / "stories"
    stories_read = [
        json.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir() if file.name.endswith(".json")
    ]
    stories_read.sort(
        key=lambda story: (_FIRST.index(story["name"]) if story["name"] in _FIRST else len(_FIRST), story["name"])
    )
    return [
        {"name": story["name"], "summary": story["summary"], "num_steps": len(story["steps"])} for story in stories_read
    ]

"""The stories of the page are those of the core, and the page finds all of them."""

from __future__ import annotations

from scripts.stories import committed, stories
from tests.gateway.serving import calling


def test_the_stories_are_what_the_core_tells() -> None:
    assert committed() == stories(), "run `make docs` and commit"


async def test_the_page_lists_each_story_and_serves_it() -> None:
    async with calling() as client:
        listed = (await client.get("/static/stories/index.json")).json()
        assert {f"{story['name']}.json" for story in listed} | {"index.json"} == stories().keys()
        assert [story["name"] for story in listed[:2]] == ["pool", "sharing"]
        for story in listed:
            served = (await client.get(f"/static/stories/{story['name']}.json")).json()
            assert (served["name"], served["summary"]) == (story["name"], story["summary"])

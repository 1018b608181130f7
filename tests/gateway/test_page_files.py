"""The page's files, and the answers of its routes to what is wrong."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

import httpx
import pytest

from kvpool.gateway.pages.files import page_files
from kvpool.v1 import cache_pb2
from scripts.stories import committed, stories
from tests.client.fakes import FakeManager, FakeWorker, fake_cluster
from tests.gateway.serving import calling


@pytest.fixture
async def page() -> AsyncIterator[httpx.AsyncClient]:
    async with calling() as client:
        yield client


async def test_the_page_and_all_its_files_are_served_with_their_types(page: httpx.AsyncClient) -> None:
    """Under a policy that lets nothing else run."""
    types = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
    for path in ["/", *(f"/static/{name}" for name in page_files())]:
        answer = await page.get(path)
        suffix = ".html" if path == "/" else re.sub(r".*(?=\.)", "", path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(types.get(suffix, "application/json"))
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]


async def test_a_browser_that_has_a_file_gets_it_no_second_time(page: httpx.AsyncClient) -> None:
    """It asks with the tag of the file; another tag gets the file."""
    tag = (await page.get("/static/main.js")).headers["etag"]
    assert (await page.get("/static/main.js", headers={"If-None-Match": tag})).status_code == 304
    assert (await page.get("/static/main.js", headers={"If-None-Match": f'"other", W/{tag}'})).status_code == 304
    assert (await page.get("/static/main.js", headers={"If-None-Match": '"other"'})).status_code == 200


@pytest.mark.parametrize(
    "path", ["/static/", "/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/none.js"]
)
async def test_no_path_leads_out_of_the_page(page: httpx.AsyncClient, path: str) -> None:
    """404, in the form of all errors."""
    answer = await page.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


def test_the_stories_are_what_the_core_tells() -> None:
    assert committed() == stories(), "run `make docs` and commit"


async def test_each_story_is_listed_and_served(page: httpx.AsyncClient) -> None:
    listed = (await page.get("/static/stories/index.json")).json()
    assert {f"{story['name']}.json" for story in listed} | {"index.json"} == stories().keys()
    assert [story["name"] for story in listed[:2]] == ["pool", "sharing"]
    for story in listed:
        served = (await page.get(f"/static/stories/{story['name']}.json")).json()
        assert (served["name"], served["summary"]) == (story["name"], story["summary"])


def test_every_module_and_style_that_is_named_is_there() -> None:
    """Imports are relative, everything else is below /static; nothing comes from elsewhere."""
    known = page_files()
    root = files("kvpool.gateway") / "static"
    for name in known:
        if not name.endswith((".js", ".html", ".css")):
            continue
        text = (root / name).read_text()
        folder = name.rpartition("/")[0]
        for imported in re.findall(r'(?:from|import) "([^"]+)"', text) if name.endswith(".js") else ():
            parts = [part for part in folder.split("/") if part]
            for part in imported.split("/"):
                if part == "..":
                    parts.pop()
                elif part != ".":
                    parts.append(part)
            assert "/".join(parts) in known, f"{name} imports {imported}"
        for path in re.findall(r'"/static/([^"]+)"', text):
            assert path in known, f"{name} names {path}"
        assert not re.search(r"(?:src|href|url|from|import|fetch)\W{1,3}https?://", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/api/prefixes?limit=201", "limit"),
        *((f"/api/prefixes?node={node}", "node") for node in ("²", "x", "-1", "9" * 30)),
        *((f"/api/requests?number={number}", "number") for number in ("", "0x1", "-1", "1" * 16)),
        ("/api/block?block_id=1", "worker_id"),
        ("/api/block?worker_id=w&block_id=-1", "block_id"),
        ("/api/block?worker_id=w&block_id=0", "block_id"),
    ],
)
async def test_a_wrong_parameter_is_named(page: httpx.AsyncClient, path: str, param: str) -> None:
    answer = await page.get(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "{}", '{"worker_id": 1}', '{"worker_id": ""}', '{"worker_id": "w", "grace": -1}']
)
async def test_a_drain_that_names_no_worker_is_refused(page: httpx.AsyncClient, body: str) -> None:
    """400, before anything is asked of the manager."""
    assert (await page.post("/api/drain", content=body)).status_code == 400


async def test_a_block_that_cannot_be_asked_for_is_an_answer_too(page: httpx.AsyncClient) -> None:
    """No manager answers."""
    assert (await page.get("/api/block?worker_id=w&block_id=1")).status_code in (503, 504)


# -- POST /api/explain, over a real client and a manager that answers what the test wants


Explaining = tuple[FakeManager, httpx.AsyncClient]


@pytest.fixture
async def explaining() -> AsyncIterator[Explaining]:
    async with fake_cluster(FakeWorker("w")) as manager, calling(manager.address) as browser:
        manager.explanation = cache_pb2.ExplainResponse(num_workers=1)
        manager.explanation.workers.add(worker_id="w", miss=cache_pb2.Miss(cause=cache_pb2.MISS_CAUSE_NEVER_SEEN))
        yield manager, browser


async def test_a_prompt_is_explained_in_json_and_in_words(explaining: Explaining) -> None:
    manager, browser = explaining
    answer = await browser.post("/api/explain", json={"prompt": "the cat", "cache_salt": "s"})
    assert answer.status_code == 200
    found = answer.json()
    assert found["workers"][0]["miss"]["cause"] == "never_seen"
    assert found["sentences"] == [
        "w would serve 0 of 3 tokens from its cache: the block from token 0 on was never seen."
    ]
    assert "token_ids" not in found
    assert manager.explains[0].root.tenant_salt == "s"


@pytest.mark.parametrize("body", [{"prompt": [1, 5]}, {"messages": [{"role": "user", "content": "the"}]}])
async def test_token_ids_and_chats_are_taken(explaining: Explaining, body: dict[str, Any]) -> None:
    _, browser = explaining
    assert (await browser.post("/api/explain", json=body)).status_code == 200


async def test_what_is_wrong_is_refused_with_a_message(explaining: Explaining) -> None:
    wrong = (
        *(b"", b"[]", b"{", b"\xff", b"{}", b'{"prompt": [-1]}', b'{"prompt": [4000000]}', b'{"messages": [{}]}'),
        *(b'{"prompt": "a", "more": 1}', b'{"prompt": "a", "messages": []}', b'{"prompt": "the", "model": "huge"}'),
    )
    _, browser = explaining
    for body in wrong:
        answer = await browser.post("/api/explain", content=body)
        assert answer.status_code == (404 if b"huge" in body else 400), body
        assert answer.json()["error"]["message"]

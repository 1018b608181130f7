"""A gateway that lives longer than its workers: what it knows of a model is what they serve now."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.server import WorkerServer
from kvpool.worker_service.settings import WorkerSettings
from tests.cluster.in_process import InProcessCluster, in_process_cluster
from tests.cluster.polling import eventually
from tests.gateway.conftest import make_chat_model
from tests.gateway.serving import http_client, serving

MESSAGES = [{"role": "user", "content": "ab"}]
LONG = {"prompt": "a" * 100, "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def make_changed_model(original: Path, folder: Path) -> None:
    """The same weights. The tokenizer has the ids of a and b exchanged, and the template is another one."""
    shutil.copytree(original, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text("NEW {% for m in messages %}{{ m.content }}{% endfor %}")


@asynccontextmanager
async def another_worker(cluster: InProcessCluster, model: Path, folder: Path, **settings: Any) -> AsyncIterator[None]:
    """A second worker of the cluster's manager, which takes requests; it has left at the end."""
    worker = await WorkerServer.load(
        WorkerSettings(
            manager=f"127.0.0.1:{cluster.manager.port}",
            worker_id="another",
            model=str(model),
            dtype="float32",
            device="cpu",
            cache_dir=default_cache_dir(),
            state_dir=folder / "state-another",
            block_size=4,
            **settings,
        )
    )

    async def is_registered() -> bool:
        return worker.engine.cache.is_ready()

    async with worker:
        await eventually(is_registered, "the worker registers")
        yield


async def seen(client: httpx.AsyncClient) -> dict[str, Any]:
    """What people and programs are shown of the model."""
    (listed,) = (await client.get("/v1/models")).json()["data"]
    tokenized = (await client.post("/tokenize", json={"messages": MESSAGES, "return_token_strs": True})).json()
    chat = {"messages": MESSAGES, "max_tokens": 1, "temperature": 0, "return_token_ids": True, "prompt_logprobs": 0}
    answer = (await client.post("/v1/chat/completions", json=chat)).json()
    detokenized = await client.post("/detokenize", json={"tokens": tokenized["tokens"]})
    shown = [next(iter(one.values()))["decoded_token"] for one in answer["prompt_logprobs"] if one is not None]
    assert answer["prompt_token_ids"] == tokenized["tokens"]
    assert shown == tokenized["token_strs"][1:]
    assert "".join(tokenized["token_strs"]) == detokenized.json()["prompt"]
    long = await client.post("/v1/completions", json=LONG)
    return {
        "limits": {listed["max_model_len"], tokenized["max_model_len"]},
        "tokens": tokenized["tokens"],
        "prompt": detokenized.json()["prompt"],
        "long": long.status_code,
    }


async def test_a_gateway_shows_and_uses_what_the_workers_serve_now(tmp_path: Path) -> None:
    """A worker comes with another limit, tokenizer and template for the same weights, and leaves. The gateway notices both by
    itself, and the stream that was running goes on as it would have."""
    make_chat_model(tmp_path / "model")
    changed_model = tmp_path / "changed" / "model"  # its name is that of the folder
    make_changed_model(tmp_path / "model", changed_model)
    async with (
        in_process_cluster(tmp_path / "model", tmp_path, max_model_len=64) as cluster,
        serving(f"127.0.0.1:{cluster.manager.port}") as gateway,
        http_client(gateway.url, timeout=60) as client,
    ):
        before = await seen(client)
        assert (before["limits"], before["prompt"], before["long"]) == ({64}, "<user>ab<assistant>", 400)
        running = cluster.client.generate("ab", max_tokens=40, ignore_eos=True, logprobs=0)
        begun = await anext(running)
        async with another_worker(cluster, changed_model, tmp_path, max_model_len=512, num_blocks=129):
            changed = await seen(client)
            assert (changed["limits"], changed["prompt"], changed["long"]) == ({512}, "NEW ab", 200)
            assert set(changed["tokens"]) != set(before["tokens"])
            completion = await running.collect()
        assert completion.token_ids[: len(begun.token_ids)] == begun.token_ids
        again = await cluster.client.generate("ab", max_tokens=40, ignore_eos=True).collect()
        assert (again.token_ids, len(again.token_ids)) == (completion.token_ids, 40)
        assert await seen(client) == before
        # A pool that is smaller than the model's limit is what can be served.
        async with another_worker(cluster, changed_model, tmp_path, max_model_len=512, num_blocks=31):
            assert (await seen(client))["limits"] == {121}

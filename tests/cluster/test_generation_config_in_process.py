"""A model with its generation_config.json as shipped: what it asks for is what a request gets that says nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig

from kvpool.client import FinishReason, GenerateOptions
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.in_process import in_process_cluster
from tests.tiny_models import EOS_TOKEN_ID, Oracle, TinyModel, make_tiny_model

NUM_NEW = 16


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), tokenizer=True)


def as_shipped(shipped: TinyModel, folder: Path, content: dict[str, Any]) -> Path:
    model = folder / "model"
    shutil.copytree(shipped.path, model)
    (model / "generation_config.json").write_text(json.dumps(content))
    return model


async def test_a_request_that_says_nothing_gets_what_the_file_asks_for(shipped: TinyModel, tmp_path: Path) -> None:
    content = {
        "max_new_tokens": 12,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": [129],
        "min_length": 20,
    }
    prompt = shipped.prompts[1]
    model = as_shipped(shipped, tmp_path, content)
    oracle, ids = Oracle.of(shipped.path), torch.tensor([prompt])
    base, _ = oracle.logits(prompt, NUM_NEW)
    asked = GenerationConfig.from_pretrained(model)
    with torch.inference_mode():
        found = oracle._model.generate(ids, asked, attention_mask=torch.ones_like(ids), pad_token_id=0)
    right = found[0, len(prompt) :].tolist()
    assert right != base[: len(right)]
    async with (
        in_process_cluster(model, tmp_path) as cluster,
        grpc.aio.insecure_channel(cluster.worker.address) as channel,
    ):
        assert (await cluster.client.generate(prompt).collect()).token_ids == tuple(right)
        said = worker_pb2.GenerateRequest(sequence_id="plain", attempt=1, token_ids=worker_pb2.TokenIds(ids=prompt))
        told = [message async for message in worker_pb2_grpc.WorkerServiceStub(channel).Generate(said)]
        assert [token for message in told for token in message.token_ids] == right
        own: GenerateOptions = {
            "max_tokens": NUM_NEW, "repetition_penalty": 1, "no_repeat_ngram_size": 0, "suppress_tokens": [], "min_tokens": 0
        }  # fmt: skip
        assert (await cluster.client.generate(prompt, **own).collect()).token_ids == tuple(base)
        assert (await cluster.client.model()).default_options == {
            "max_tokens": 12, "repetition_penalty": 1.3, "no_repeat_ngram_size": 1, "suppress_tokens": (129,), "min_length": 20
        }  # fmt: skip


async def test_a_chat_ends_at_the_tokenizers_end_of_turn_and_a_text_does_not(
    shipped: TinyModel, tmp_path: Path
) -> None:
    prompt = "system: a\nuser: b\nassistant: "
    model = as_shipped(shipped, tmp_path, {"max_new_tokens": NUM_NEW})
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt).ids
    base, _ = Oracle.of(shipped.path).logits(tuple(ids), NUM_NEW)
    place = next(
        place for place, token in enumerate(base) if place and token < EOS_TOKEN_ID and token not in base[:place]
    )
    name = Tokenizer.from_file(str(model / "tokenizer.json")).id_to_token(base[place])
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
    async with in_process_cluster(model, tmp_path) as cluster:
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        chat = await cluster.client.chat(messages).collect()
        assert (chat.token_ids, chat.finish_reason) == (tuple(base[:place]), FinishReason.STOP)
        assert (await cluster.client.chat(messages, ignore_eos=True).collect()).token_ids == tuple(base)
        assert (await cluster.client.generate(prompt).collect()).token_ids == tuple(base)

"""A model with its generation_config.json as shipped: a request that says nothing gets the text of `generate` with that file."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig

from kvpool.client import FinishReason, GenerateOptions
from kvpool.client.prompt import Prompt
from kvpool.client.request import attempt_request, build_request, request_for
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from kvpool.worker_service.model.generation import read_generation, read_generation_config
from tests.cluster.in_process import in_process_cluster
from tests.gateway.serving import serving
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, Oracle, TinyModel, make_tiny_model

NUM_NEW = 16


class Shipped:
    """A tiny model as transformers has it, with another generation_config.json each time."""

    def __init__(self, tiny: TinyModel, folder: Path) -> None:
        self.folder = folder
        self.model = Oracle.of(tiny.path)._model
        self.prompts = tiny.prompts
        shutil.copy(tiny.path / "config.json", folder)

    @contextmanager
    def with_file(self, content: dict[str, Any]) -> Iterator[None]:
        (self.folder / "generation_config.json").write_text(json.dumps(content))
        own = self.model.generation_config
        self.model.generation_config = GenerationConfig.from_pretrained(self.folder)
        yield
        self.model.generation_config = own

    def text(self, prompt: Sequence[int]) -> list[int]:
        """What generate gives without another option, up to the id that ends it."""
        ids = torch.tensor([prompt])
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a least length above the largest
            found = self.model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0)
        tokens: list[int] = found[0, len(prompt) :].tolist()
        eos = self.model.generation_config.eos_token_id
        ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
        end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        return tokens[:end]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    folder = tmp_path_factory.mktemp("shipped")
    return Shipped(make_tiny_model("llama", tmp_path_factory.mktemp("llama"), tokenizer=True), folder)


def drawn(seed: int, base: Sequence[int]) -> dict[str, Any]:
    """Some fields, with values that matter for a text that would be `base`."""
    rng = random.Random(seed)

    def some() -> int:
        return rng.choice(base)

    fields: dict[str, Any] = {
        "eos_token_id": rng.choice([some(), [some(), some()], EOS_TOKEN_ID, -1, [VOCAB_SIZE + 3, some()]]),
        "repetition_penalty": rng.choice([0.8, 1.2, 1.7]),
        "no_repeat_ngram_size": rng.choice([1, 2, 3]),
        "encoder_no_repeat_ngram_size": rng.choice([1, 2]),
        "suppress_tokens": [some() for _ in range(rng.randint(1, 3))],
        "begin_suppress_tokens": [base[0], some()],
        "bad_words_ids": [[some()], list(base[2:4]), list(base[5:8]), [base[8], some()]],
        "min_new_tokens": rng.randint(1, 12),
        "min_length": rng.randint(5, 60),
        "forced_eos_token_id": rng.choice([some(), EOS_TOKEN_ID, [some(), EOS_TOKEN_ID]]),
        "temperature": 0.6,
        "top_p": 0.9,
        "num_beams": rng.choice([2, 3]),
        "length_penalty": rng.choice([-1.0, 0.5, 2.0]),
        "early_stopping": rng.choice([True, False, "never"]),
        "renormalize_logits": False,
        "use_cache": True,
    }
    kept = {name: value for name, value in fields.items() if rng.random() < 0.3}
    if "forced_eos_token_id" in kept:
        kept.pop("suppress_tokens", None)  # with an id in both, transformers refuses the file
        if "num_beams" in kept and isinstance(kept["forced_eos_token_id"], list):
            kept["forced_eos_token_id"] = EOS_TOKEN_ID  # torch.topk takes any one of equal scores
    length = {"max_length": 60} if rng.random() < 0.5 else {"max_new_tokens": rng.randint(3, NUM_NEW)}
    return kept | {"eos_token_id": fields["eos_token_id"]} | length


async def test_drawn_files_give_the_texts_of_generate_wherever_they_move(shipped: Shipped, tmp_path: Path) -> None:
    """Also where a request is continued on a worker of another file: what the client has filled in holds there."""
    async with (
        in_process_cluster(Path(shipped.model.name_or_path), tmp_path) as cluster,
        grpc.aio.insecure_channel(cluster.worker.address) as channel,
    ):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        model = await cluster.client.model()
        numbers = random.Random(0)
        num_searched = 0
        bases = [Oracle(shipped.model).logits(prompt, NUM_NEW)[0] for prompt in shipped.prompts]
        for seed in range(16):
            prompt = shipped.prompts[seed % len(bases)]
            content = drawn(seed, bases[seed % len(bases)])
            with shipped.with_file(content):
                right = shipped.text(prompt)
            found = read_generation(
                read_generation_config(shipped.folder), shipped.folder, vocab_size=VOCAB_SIZE, end_of_turn={}
            )
            asked = request_for(
                build_request({"stop_token_ids": found.eos_token_ids}),
                replace(model, defaults=found.defaults),
                Prompt(list(prompt)),
            )
            is_search = asked.beam_search.num_beams > 1
            num_searched += is_search
            for cut in {0, 0 if is_search or not right else numbers.randrange(len(right))}:
                request = attempt_request(
                    asked,
                    token_ids=[*prompt, *right[:cut]],
                    num_delivered=cut,
                    sequence_id=f"{seed}-{cut}",
                    attempt=1,
                    model_fingerprint="",
                )
                tokens = [token async for message in stub.Generate(request) for token in message.token_ids]
                assert tokens == right[cut:], (seed, cut, content)
        assert num_searched > 1


def as_shipped(shipped: Shipped, folder: Path, content: dict[str, Any]) -> Path:
    model = folder / "model"
    shutil.copytree(shipped.model.name_or_path, model)
    (model / "generation_config.json").write_text(json.dumps(content))
    return model


async def test_a_request_that_says_nothing_gets_what_the_file_asks_for(shipped: Shipped, tmp_path: Path) -> None:
    """From the library, and from a caller that knows no more than the protocol; and each option overrides the field."""
    content = {
        "max_new_tokens": 12,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": [129],
        "min_length": 20,
    }
    prompt = shipped.prompts[1]
    base, _ = Oracle(shipped.model).logits(prompt, NUM_NEW)
    with shipped.with_file(content):
        right = shipped.text(prompt)
    assert right != base[: len(right)]
    async with (
        in_process_cluster(as_shipped(shipped, tmp_path, content), tmp_path) as cluster,
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


async def test_a_file_that_asks_to_sample_makes_its_options_the_defaults(shipped: Shipped, tmp_path: Path) -> None:
    """A request without them is one with them; an explicit temperature of 0 is greedy; each answer has a seed of its own."""
    content = {"do_sample": True, "temperature": 1.5, "top_k": 7, "max_new_tokens": 12}
    prompt = shipped.prompts[1]
    base, _ = Oracle(shipped.model).logits(prompt, NUM_NEW)
    async with in_process_cluster(as_shipped(shipped, tmp_path, content), tmp_path) as cluster:
        said = await cluster.client.generate(prompt, seed=5, n=2, temperature=1.5, top_k=7, max_tokens=12).collect_all()
        unsaid = await cluster.client.generate(prompt, seed=5, n=2).collect_all()
        assert [one.token_ids for one in unsaid] == [one.token_ids for one in said]
        assert unsaid[0].token_ids != unsaid[1].token_ids
        others = {(await cluster.client.generate(prompt).collect()).token_ids for _ in range(3)}
        assert len(others) > 1, "without a seed each request has one of its own"
        greedy = await cluster.client.generate(prompt, temperature=0).collect()
        assert greedy.token_ids == tuple(base[:12])
        async with (
            serving(f"127.0.0.1:{cluster.manager.port}") as gateway,
            httpx.AsyncClient(base_url=gateway.url) as http,
        ):
            # Without a word, OpenAI's temperature of 1 is not meant.
            body = {"prompt": prompt, "seed": 5, "max_tokens": 12, "return_token_ids": True}
            (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
            assert choice["token_ids"] == list(said[0].token_ids)
            (listed,) = (await http.get("/v1/models")).json()["data"]
            shown = (await http.get(f"/v1/models/{listed['id']}")).json()
            assert shown["default_options"] == {"temperature": 1.5, "top_k": 7, "max_tokens": 12}


async def test_a_chat_ends_at_the_tokenizers_end_of_turn_and_a_text_does_not(shipped: Shipped, tmp_path: Path) -> None:
    prompt = "system: a\nuser: b\nassistant: "
    model = as_shipped(shipped, tmp_path, {"max_new_tokens": NUM_NEW})
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt).ids
    base, _ = Oracle(shipped.model).logits(tuple(ids), NUM_NEW)
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

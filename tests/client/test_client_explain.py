"""Why a prompt is not served: what the client asks, what it keeps with a stream, and what it says in words."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

from kvpool.client import Explanation, InvalidRequest, MissCause
from kvpool.client.prompt import RoutedPrompt
from kvpool.protocol.tokens import pack_tokens
from kvpool.v1 import cache_pb2, common_pb2
from tests.client.clients import quick
from tests.client.commands import kvpool
from tests.client.fakes import UNAVAILABLE, FakeWorker, answer, fake_cluster
from tests.client.words import BOS, CAT, THE, word_tokenizer

ROOT = common_pb2.Root(model_fingerprint="fp-tiny")
KEY = common_pb2.SequenceKey(sequence_id="leader", attempt=1)


def answered(cause: cache_pb2.MissCause, **fields: Any) -> cache_pb2.ExplainResponse:
    """One worker that serves 16 tokens."""
    miss = cache_pb2.Miss(position=16, cause=cause, **fields)
    worker = cache_pb2.WorkerExplanation(worker_id="w", num_cached_tokens=16, miss=miss)
    return cache_pb2.ExplainResponse(workers=[worker], num_workers=1)


def said(response: cache_pb2.ExplainResponse, tokenizer: Tokenizer | None = None) -> list[str]:
    """The explanation of a prompt of 40 tokens in words."""
    return Explanation.from_proto(response, RoutedPrompt(ROOT, list(range(40)), 0)).sentences(tokenizer)


WORDS: dict[cache_pb2.MissCause, list[tuple[dict[str, Any], str]]] = {
    cache_pb2.MISS_CAUSE_UNSPECIFIED: [({}, "for a reason that this client does not know: update it")],
    cache_pb2.MISS_CAUSE_NEVER_SEEN: [({}, "the block from token 16 on was never seen")],
    cache_pb2.MISS_CAUSE_EVICTED: [
        (
            {"evicted_ms_ago": 90_000, "evicted_for": KEY, "other_worker_id": "v"},
            "the block from token 16 on was probably evicted 90 s ago, to make room for leader; v still has it",
        ),
        ({"evicted_ms_ago": 3_600_000}, "was probably evicted 60 min ago"),
    ],
    cache_pb2.MISS_CAUSE_OTHER_ROOT: [
        ({"other_root": common_pb2.Root(model_fingerprint="other")}, "is cached only for another model (other)"),
        (
            {"other_root": common_pb2.Root(model_fingerprint="fp-tiny", adapter="law"), "other_salt": True},
            "is cached only with the adapter law and under another tenant's salt",
        ),
        (
            {"other_root": ROOT, "other_block_size": 32, "other_worker_id": "v"},
            "is cached only in blocks of 32 tokens, or with another input (on v)",
        ),
    ],
    cache_pb2.MISS_CAUSE_BEING_COMPUTED: [
        ({"leader": KEY, "leader_position": 32}, "leader is computing the tokens from 16 to 32 now.")
    ],
    cache_pb2.MISS_CAUSE_PARTIAL_TAIL: [({}, "the rest does not fill a block")],
    cache_pb2.MISS_CAUSE_LAST_TOKEN: [({}, "the last token is always computed")],
    cache_pb2.MISS_CAUSE_ON_ANOTHER_WORKER: [({"other_worker_id": "v"}, "is cached on v, not here")],
    cache_pb2.MISS_CAUSE_WINDOW_NOT_KEPT: [
        (
            {"num_passed_tokens": 32},
            "layers that see everything have 32 tokens, but no sliding window that ends after token 16 is kept whole",
        )
    ],
    cache_pb2.MISS_CAUSE_SNAPSHOT_NOT_KEPT: [
        (
            {"num_passed_tokens": 32},
            "layers that attend have 32 tokens, but no snapshot of the recurrent layers' state after token 16 is kept",
        )
    ],
}


@pytest.mark.parametrize("name", cache_pb2.MissCause.keys())
def test_each_cause_of_the_manager_has_its_words(name: str) -> None:
    cause = cast(cache_pb2.MissCause, cache_pb2.MissCause.Value(name))
    for fields, words in WORDS[cause]:
        (sentence,) = said(answered(cause, **fields))
        assert sentence.startswith("w would serve 16 of 40 tokens from its cache: ")
        assert words in sentence


def test_the_token_where_two_prompts_part_is_said_as_text() -> None:
    response = answered(cache_pb2.MISS_CAUSE_NEVER_SEEN)
    response.closest.MergeFrom(
        cache_pb2.ClosestPrompt(
            num_equal_tokens=7, prompt_token=THE, cached_token=CAT, num_prompts=312, num_tokens_gained=1840,
            num_different_tokens=1,
        )
    )  # fmt: skip
    rest = "at token 7; after it 1,840 more tokens would have been served"
    tokenizer = Tokenizer.from_str(word_tokenizer())
    assert said(response, tokenizer)[1] == f'Your prompt has "the" where 312 cached ones have "cat", {rest}.'
    assert said(response)[1].startswith(f"Your prompt has token {THE} where 312 cached ones have token {CAT}, {rest}")
    response.closest.num_different_tokens = 3
    assert said(response)[1].endswith("served, if 3 tokens of that block were the same.")
    response.closest.ClearField("prompt_token")
    assert len(said(response)) == 1


def test_without_a_worker_the_words_say_so() -> None:
    assert said(cache_pb2.ExplainResponse()) == ["No live worker takes this prompt."]


async def test_a_prompt_is_tokenised_and_asked_about_under_its_root() -> None:
    async with fake_cluster(FakeWorker("w")) as manager, quick(manager) as client:
        manager.explanation = answered(cache_pb2.MISS_CAUSE_NEVER_SEEN)
        found = await client.explain("the cat", tenant_salt="s", worker_id="w")
        (request,) = manager.explains
        assert request.root == common_pb2.Root(model_fingerprint="fp-tiny", tenant_salt="s")
        assert (request.tokens, request.worker_id) == (pack_tokens([BOS, THE, CAT]), "w")
        assert (found.token_ids, found.num_cached_tokens) == ((BOS, THE, CAT), 16)
        await client.explain(messages=[{"role": "user", "content": "the"}])
        assert len(manager.explains[1].tokens) > 4
        for wrong in ({}, {"prompt": "the", "messages": []}):
            with pytest.raises(InvalidRequest, match="either a prompt or messages"):
                await client.explain(**wrong)  # type: ignore[arg-type]


async def test_a_stream_keeps_what_was_true_before_its_worker_had_the_prompt() -> None:
    async with fake_cluster(FakeWorker("w")) as manager, quick(manager) as client:
        manager.explanation = answered(cache_pb2.MISS_CAUSE_NEVER_SEEN)
        plain = client.generate("the")
        await plain.collect()
        assert (plain.explanation, manager.routes[0].explain) == (None, False)
        stream = client.generate("the", explain=True)
        await stream.collect()
        assert stream.explanation is not None
        assert stream.explanation.workers[0].miss.cause is MissCause.NEVER_SEEN
        assert manager.explains == [], "it came with the route"


async def test_a_stream_asks_why_once_however_often_it_moves() -> None:
    """Later its own blocks would be hits."""
    async with (
        fake_cluster(FakeWorker("v", [UNAVAILABLE]), FakeWorker("w", [UNAVAILABLE], answer(THE))) as manager,
        quick(manager) as client,
    ):
        manager.explanation = answered(cache_pb2.MISS_CAUSE_NEVER_SEEN)
        stream = client.generate("the", explain=True)
        await stream.collect()
        assert stream.explanation is not None
    assert [route.explain for route in manager.routes] == [True, False]


async def test_a_manager_that_does_not_explain_ends_no_stream() -> None:
    async with fake_cluster(FakeWorker("w")) as manager, quick(manager) as client:
        manager.explanation = None
        stream = client.generate("the", explain=True)
        assert (await stream.collect()).worker_id == "w"
        assert stream.explanation is None


async def test_the_command_prints_sentences_or_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        manager.explanation = answered(cache_pb2.MISS_CAUSE_NEVER_SEEN)
        assert await kvpool("explain", "the cat", "--manager", manager.address) == 0
        sentence = "w would serve 16 of 3 tokens from its cache: the block from token 16 on was never seen."
        assert capsys.readouterr().out == f"{sentence}\n"
        assert await kvpool("explain", "the", "--chat", "--worker", "w", "--json", "--manager", manager.address) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["workers"][0]["miss"]["cause"] == "never_seen"
        assert found["closest"] is None
        assert manager.explains[1].worker_id == "w"
        assert await kvpool("explain", "the", "--system", "x", "--manager", manager.address) == 2

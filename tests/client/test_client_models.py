"""Which worker a model is fetched from, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from google.rpc import code_pb2

from kvpool.client import Client, DeadlineExceeded, InvalidRequest, ProtocolError, models
from kvpool.client.model_files import receive_model
from kvpool.v1 import worker_pb2
from tests.client.clients import quick
from tests.client.fakes import UNAVAILABLE, FakeModel, FakeWorker, answer, error_status, fake_cluster
from tests.client.words import CAT, SAT, THE, WORDS, text_files
from tests.until import until

CAT_CHAT = [{"role": "user", "content": "cat"}]


async def test_a_known_model_does_not_wait_for_the_fetch_of_another() -> None:
    known, frozen = FakeWorker("w1"), FakeWorker("w2", model=FakeModel(name="big", fingerprint="fp-big"))
    frozen.may_send_model.clear()
    async with fake_cluster(known, frozen) as manager, quick(manager) as client:
        await client.model("tiny")
        fetch = asyncio.create_task(client.model("big"))
        await until(lambda: frozen.num_model_calls)
        async with asyncio.timeout(20):
            assert (await client.generate("the", model="tiny").collect()).worker_id == "w1"
        assert not fetch.done()
        frozen.may_send_model.set()
        assert (await fetch).name == "big"


async def test_a_frozen_worker_is_passed_over_when_the_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the call and says nothing; its lease still runs. The next one is asked after seconds, not half a minute."""
    monkeypatch.setattr(models, "_FACTS_TIMEOUT_SECONDS", 0.5)
    frozen, live = FakeWorker("frozen"), FakeWorker("live")
    frozen.may_send_model.clear()
    async with fake_cluster(frozen, live) as manager:
        async with quick(manager) as client:
            assert (await client.model()).name == "tiny"
        assert (frozen.num_model_calls, live.num_model_calls) == (1, 1)
        manager.workers = [frozen]
        async with quick(manager) as client:
            with pytest.raises(DeadlineExceeded, match="while asking frozen"):
                await client.model(timeout=0.3)


async def messages_after(first_seconds: float, others_seconds: float) -> AsyncIterator[worker_pb2.GetModelResponse]:
    first, *others = FakeModel().messages("w")
    await asyncio.sleep(first_seconds)
    yield first
    for message in others:
        await asyncio.sleep(others_seconds / len(others))
        yield message


async def test_only_the_facts_must_come_at_once() -> None:
    """A large tokenizer over a slow line is no frozen worker."""
    facts, files = await receive_model(messages_after(0.0, 0.5), "w", facts_timeout=0.2)
    assert facts.model_name == "tiny"
    assert files == FakeModel().files
    with pytest.raises(TimeoutError):
        await receive_model(messages_after(0.5, 0.0), "w", facts_timeout=0.2)


async def test_an_answer_that_does_not_begin_with_the_facts_is_refused() -> None:
    async def part_of_it(messages: slice) -> AsyncIterator[worker_pb2.GetModelResponse]:
        for message in FakeModel().messages("w")[messages]:
            yield message

    for messages in (slice(1, 2), slice(0)):
        with pytest.raises(ProtocolError) as caught:
            await receive_model(part_of_it(messages), "w", facts_timeout=1.0)
        assert caught.value.reason == "BAD_MODEL_FILE"


# -- what changes while a client lives


OTHER_MODEL = error_status(code_pb2.FAILED_PRECONDITION, "OTHER_MODEL", "it was tokenised for another model")
OTHER_WORDS = (*WORDS[:5], *reversed(WORDS[5:]))
TEMPLATE = "{{ bos_token }} {{ messages[0].content }}"
MAT = FakeModel(files=text_files(TEMPLATE, bos_token="mat"))
DOG = FakeModel(files=text_files(TEMPLATE, bos_token="dog"))
"""Models whose prompt of CAT_CHAT is their first token and "cat"."""
MAT_PROMPT, DOG_PROMPT = ([WORDS.index(word), CAT] for word in ("mat", "dog"))
CHANGES = {
    "template": FakeModel(files=text_files("the {{ messages[0].content }}", bos_token="mat")),
    "tokenizer": FakeModel(files=text_files(TEMPLATE, OTHER_WORDS, bos_token="mat")),
    "special token": DOG,
    "other weights": FakeModel(fingerprint="fp-other", files=DOG.files),
    "no template": FakeModel(files=text_files("{{ raise_exception('no') }}")),
}


def old_and_new() -> tuple[FakeWorker, FakeWorker]:
    """Workers of one model whose files have changed; the one that has the new files registered last."""
    old, new = FakeWorker("old", model=MAT), FakeWorker("new", model=DOG)
    new.session += 1
    return old, new


async def prompt_of(worker: FakeWorker, client: Client) -> list[int] | str:
    """The prompt of CAT_CHAT, as the worker gets it; the error's reason if there is one."""
    try:
        await client.chat(CAT_CHAT, model="tiny").collect()
    except InvalidRequest as error:
        return error.reason
    return list(worker.requests[-1].token_ids.ids)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("back", [False, True])
async def test_a_client_notices_what_has_changed_of_a_model(change: str, back: bool) -> None:
    """The next request is that of a new client, and so is what model() returns. A change back fetches nothing."""
    worker = FakeWorker("w", model=MAT)
    async with fake_cluster(worker) as manager, quick(manager) as client:
        first = await prompt_of(worker, client)
        worker.session += 1
        worker.model = CHANGES[change]
        async with quick(manager) as fresh:
            expected = await prompt_of(worker, fresh)
        assert expected != first
        assert await prompt_of(worker, client) == expected
        model = await client.model("tiny")
        assert (model.fingerprint, model.chat_template is None) == (worker.model.fingerprint, False)
        assert worker.num_model_calls == 3
        if back:
            worker.session += 1
            worker.model = MAT
            assert await prompt_of(worker, client) == first
            assert worker.num_model_calls == 3


async def test_what_is_known_is_the_facts_of_the_worker_that_registered_last() -> None:
    old, new = old_and_new()
    async with fake_cluster(old, new) as manager, quick(manager) as client:
        for manager.workers, expected in (([old, new], DOG_PROMPT), ([old], MAT_PROMPT), ([old, new], DOG_PROMPT)):
            assert await prompt_of(old, client) == expected


async def test_the_limit_is_that_of_the_largest_worker_and_smaller_ones_are_left_out() -> None:
    small = FakeWorker("small", model=FakeModel(max_model_len=8, listed_model_len=8))
    large = FakeWorker("large", model=FakeModel(max_model_len=20, listed_model_len=20))
    async with fake_cluster(small, large) as manager, quick(manager) as client:
        for listed in ([small, large], [large, small]):
            manager.workers = listed
            (served,) = models.served_models((await client.describe()).workers)
            assert served.max_model_len == 20
        manager.workers = [small]
        with pytest.raises(InvalidRequest) as refused:
            await client.generate([THE] * 8).collect()
        assert refused.value.reason == "NEVER_FITS"
        assert (await client.model()).max_model_len == 8
        manager.workers = [small, large]
        # Its text may reach the model's limit, which is 20 now, and it is known to the manager alone.
        assert (await client.generate([THE]).collect()).worker_id == "large"
        assert (await client.generate([THE] * 8).collect()).worker_id == "large"
        assert (await client.generate([THE], max_tokens=7).collect()).worker_id == "small"
        assert (await client.generate([THE], max_tokens=8).collect()).worker_id == "large"
        # No worker has room: the largest one says what is wrong. This one says nothing.
        assert (await client.generate([THE], max_tokens=20).collect()).worker_id == "large"
        assert [request.num_needed_tokens for request in manager.routes[-2:]] == [21, 20]
        manager.workers = [small]
        assert (await client.generate([THE]).collect()).worker_id == "small"
        with pytest.raises(InvalidRequest) as refused:
            await client.generate([THE] * 8).collect()
        assert (refused.value.reason, large.num_model_calls, small.num_model_calls) == ("NEVER_FITS", 0, 1)


async def test_a_request_in_flight_is_not_touched_by_a_change() -> None:
    first = FakeWorker("first", [*answer(THE, CAT)[:2], UNAVAILABLE], model=FakeModel(listed_model_len=32))
    changed = FakeModel(files=text_files("{{ raise_exception('no') }}", OTHER_WORDS), listed_model_len=10)
    second = FakeWorker("second", answer(SAT), model=changed)
    second.session += 1
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        manager.workers = [first]
        stream = client.chat(CAT_CHAT)
        assert (await anext(stream)).token_ids == (THE,)
        manager.workers = [second]
        completion = await stream.collect()
    assert completion.token_ids == (THE, CAT, SAT)
    assert list(second.requests[0].token_ids.ids) == [*first.requests[0].token_ids.ids, THE, CAT]
    assert [request.num_needed_tokens for request in manager.routes] == [32, 32, 10]


async def test_a_worker_that_has_another_model_by_now_costs_no_request() -> None:
    """It was started again after the request was routed to it, under the same name: the request is tokenised for what it serves."""
    may_answer = asyncio.Event()
    worker = FakeWorker("w", [may_answer, OTHER_MODEL], answer(SAT), model=MAT)
    async with fake_cluster(worker) as manager, quick(manager) as client:
        asked = asyncio.create_task(client.chat(CAT_CHAT, model="tiny").collect())
        await worker.asked.wait()
        worker.session += 1
        worker.model = CHANGES["other weights"]
        may_answer.set()
        assert (await asked).token_ids == (SAT,)
    first, last = worker.requests
    assert (first.model_fingerprint, last.model_fingerprint) == ("fp-tiny", "fp-other")
    assert list(last.token_ids.ids) == DOG_PROMPT


async def test_a_newest_worker_that_does_not_answer_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "_FACTS_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(models, "_RETRY_SECONDS", 3600.0)
    old, new = old_and_new()
    new.may_send_model.clear()
    async with fake_cluster(old, new) as manager, quick(manager) as client:
        for _ in range(3):
            assert await prompt_of(old, client) == MAT_PROMPT
        assert (new.num_model_calls, old.num_model_calls) == (1, 1)
    monkeypatch.setattr(models, "_RETRY_SECONDS", 0.0)
    async with fake_cluster(old, new) as manager, quick(manager) as client:
        assert await prompt_of(old, client) == MAT_PROMPT
        new.may_send_model.set()
        assert await prompt_of(old, client) == DOG_PROMPT


@pytest.mark.parametrize("named", ["tiny", None])
async def test_a_model_whose_workers_leave_makes_room_for_the_next_one_of_its_name(named: str | None) -> None:
    old = FakeWorker("old")
    new = FakeWorker("new", model=FakeModel(fingerprint="fp-other"))
    async with fake_cluster(old, new) as manager, quick(manager) as client:
        with pytest.raises(InvalidRequest, match="several models"):
            await client.model(named)
        old.is_draining = True
        assert (await client.model(named)).fingerprint == "fp-other"
        assert (await client.model("fp-tiny")).fingerprint == "fp-tiny"

"""OpenAI's own client gets what kvpool's client gets, token by token."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import openai
import pytest

from kvpool.client import GenerateOptions
from kvpool.gateway.openai.logprobs import shown
from kvpool.process.address import listen
from tests.gateway.conftest import Front, ids_of
from tests.gateway.serving import completion, http_client, serving
from tests.until import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

MESSAGES: list[Any] = [{"role": "user", "content": "the cache that keeps what it has read"}]
PROMPT = "abcdefgh" * 3
NUM_NEW = 12


async def test_a_chat_is_kvpools_own_chat_streamed_or_not(front: Front) -> None:
    """Tokens, text, finish reason and what the cache served are the same."""
    own = await front.cluster.client.chat(MESSAGES, max_tokens=NUM_NEW, ignore_eos=True).collect()
    whole = await front.chat(MESSAGES, max_tokens=NUM_NEW)
    (choice,) = whole.choices
    assert (choice.message.content, ids_of(choice)) == (own.text, list(own.token_ids))
    assert choice.finish_reason == own.finish_reason.value
    again = await front.cluster.client.chat(MESSAGES, max_tokens=NUM_NEW, ignore_eos=True).collect()
    assert whole.usage.prompt_tokens_details.cached_tokens == again.num_cached_tokens > 0
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (own.num_prompt_tokens, NUM_NEW)

    text, usages, ids = "", [], list[int]()
    options = {"include_usage": True}
    async for chunk in await front.chat(MESSAGES, max_completion_tokens=NUM_NEW, stream=True, stream_options=options):
        usages += [chunk.usage] if chunk.usage is not None else []
        for part in chunk.choices:
            text += part.delta.content or ""
            ids += ids_of(part)
    assert (text, ids) == (own.text, list(own.token_ids))
    assert [usage.completion_tokens for usage in usages] == [NUM_NEW]


@pytest.mark.parametrize("wanted", [None, False, True])
async def test_usage_comes_with_each_event_if_asked_for(front: Front, wanted: bool | None) -> None:
    """Of each answer what it has used so far, and in the end what all have used; without the option it is null before the end."""
    options = {"include_usage": True, "continuous_usage_stats": wanted}
    arguments: dict[str, Any] = {"max_tokens": 4, "n": 2, "stream": True, "stream_options": options}
    for stream in (await front.complete(PROMPT, **arguments), await front.chat(MESSAGES, **arguments)):
        *events, last = [event async for event in stream]
        assert last.usage.completion_tokens == 8
        if not wanted:
            assert {event.usage for event in events} == {None}
            continue
        for choice in (0, 1):
            of_choice = [event for event in events if event.choices[0].index == choice]
            counts = [event.usage.completion_tokens for event in of_choice]
            assert counts == sorted(counts)
            assert counts[-1] == 4
            for event in of_choice:
                assert event.usage.prompt_tokens == last.usage.prompt_tokens
                assert event.usage.total_tokens == event.usage.prompt_tokens + event.usage.completion_tokens
            assert sum(bool(ids_of(event.choices[0])) for event in of_choice) > 1


async def test_messages_may_have_null_where_openai_allows_it(front: Front) -> None:
    """An assistant that only calls a tool says nothing; a content of parts is a text."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "ab"}]},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    answer = await front.chat(messages, max_tokens=1)
    model = await front.cluster.client.model()
    text = "<user>ab<assistant><tool>42<assistant>"
    assert answer.to_dict()["prompt_token_ids"] == model.encode_text(text, special=False)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"temperature": 0.9, "seed": 7}, {"temperature": 0.9, "seed": 7}),
        ({"temperature": 0.9, "seed": -1}, {"temperature": 0.9, "seed": 2**64 - 1}),
        ({"temperature": 1.2, "seed": 3, "extra": {"top_k": 5, "min_p": 0.1}},
         {"temperature": 1.2, "seed": 3, "top_k": 5, "min_p": 0.1}),
        ({"temperature": 1.2, "seed": 3, "top_p": 0.5, "extra": {"top_k": -1}},
         {"temperature": 1.2, "seed": 3, "top_p": 0.5}),
        ({"presence_penalty": 1.5, "frequency_penalty": -1, "logit_bias": {"9": 5}},
         {"presence_penalty": 1.5, "frequency_penalty": -1, "logit_bias": {9: 5.0}}),
        ({"extra": {"repetition_penalty": 1.5, "min_tokens": 3}}, {"repetition_penalty": 1.5, "min_tokens": 3}),
        ({"user": "ann", "extra": {"cache_salt": "s", "priority": 3}},
         {"tenant": "ann", "tenant_salt": "s", "priority": 3}),
        ({"temperature": None, "top_p": None, "stop": None, "logit_bias": None, "seed": 5, "n": None},
         {"temperature": 1.0, "seed": 5}),
        ({"extra": {"no_repeat_ngram_size": 1, "suppress_tokens": [97, 98], "bad_words_ids": [[99], [1, 2]],
          "begin_suppress_tokens": [3], "forced_eos_token_id": 101, "encoder_no_repeat_ngram_size": 2}},
         {"no_repeat_ngram_size": 1, "suppress_tokens": [97, 98], "bad_words_ids": [[99], [1, 2]],
          "begin_suppress_tokens": [3], "forced_eos_token_id": 101, "encoder_no_repeat_ngram_size": 2}),
    ],
)  # fmt: skip
async def test_every_option_means_what_it_means_to_the_client(
    front: Front, fields: dict[str, Any], options: GenerateOptions
) -> None:
    asked: GenerateOptions = {**options, "max_tokens": NUM_NEW}
    own = await front.cluster.complete(PROMPT, **asked)
    whole = await front.complete(PROMPT, max_tokens=NUM_NEW, **fields)
    assert ids_of(whole.choices[0]) == list(own.token_ids)


async def test_token_ids_are_a_prompt(front: Front) -> None:
    ids = [7, 8, 9, 10, 11]
    own = await front.cluster.complete(ids, max_tokens=NUM_NEW)
    for prompt in (ids, [ids]):
        assert ids_of((await front.complete(prompt, max_tokens=NUM_NEW)).choices[0]) == list(own.token_ids)


async def test_stop_strings_end_a_text(front: Front) -> None:
    own = await front.cluster.complete(PROMPT, max_tokens=NUM_NEW)
    stop = own.text[4:6]
    for given in (stop, [stop, "never there"]):
        (choice,) = (await front.complete(PROMPT, max_tokens=NUM_NEW, stop=given)).choices
        assert (choice.text, choice.finish_reason) == (own.text[: own.text.index(stop)], "stop")


async def test_n_answers_have_the_next_seeds_and_a_list_of_prompts_has_its_order(front: Front) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 5}
    prompts = [PROMPT, "hgfedcba" * 2]
    whole = await front.complete(prompts, n=2, seed=11, **drawn)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(whole.choices):
        own = await front.cluster.complete(prompts[index // 2], seed=11 + index % 2, **drawn)
        assert ids_of(choice) == list(own.token_ids)
    assert whole.usage.completion_tokens == 20
    assert whole.usage.prompt_tokens == sum(map(len, prompts)), "each prompt counts once"

    drawn["ignore_eos"] = True
    alone = [await front.cluster.client.chat(MESSAGES, seed=seed, **drawn).collect() for seed in (5, 6, 7)]
    whole = await front.chat(MESSAGES, n=3, seed=5, temperature=1.0, max_tokens=5)
    assert [ids_of(choice) for choice in whole.choices] == [list(one.token_ids) for one in alone]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (alone[0].num_prompt_tokens, 15)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"num_beams": 3}, {"num_beams": 3}),
        ({"use_beam_search": True}, {"num_beams": 2}),
        ({"use_beam_search": True, "num_beams": 4, "length_penalty": 0.5, "early_stopping": "never"},
         {"num_beams": 4, "length_penalty": 0.5, "early_stopping": "never"}),
        ({"use_beam_search": False, "length_penalty": 1, "num_beams": 1}, {}),
    ],
)  # fmt: skip
async def test_beams_are_those_of_the_client(
    front: Front, fields: dict[str, Any], options: GenerateOptions, stream: bool
) -> None:
    """vLLM's spelling too: there n is the number of beams. Streamed or not, the texts come with their index, the best one first."""
    asked: GenerateOptions = {"n": 2, "max_tokens": 8, "ignore_eos": True, "seed": 3, **options}
    own = await front.cluster.client.generate(PROMPT, **asked).collect_all()
    found: dict[int, list[int]] = {0: [], 1: []}
    temperature: Any = openai.NOT_GIVEN if options else 0
    answer = await front.complete(
        PROMPT, n=2, seed=3, max_tokens=8, temperature=temperature, stream=stream, extra=fields
    )
    for part in [event async for event in answer] if stream else [answer]:
        for choice in part.choices:
            found[choice.index] += ids_of(choice)
    assert found == {index: list(one.token_ids) for index, one in enumerate(own)}
    if not stream:
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 16)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_and_log_probabilities_are_those_of_prompt_and_answer(front: Front, stream: bool) -> None:
    own = await front.cluster.complete(PROMPT, max_tokens=4, logprobs=2, prompt_logprobs=2, echo=True)
    answer = await front.complete(PROMPT, max_tokens=4, echo=True, logprobs=2, stream=stream)
    text, found = "", dict[str, list[Any]]()
    for part in [event async for event in answer] if stream else [answer]:
        (choice,) = part.choices
        text += choice.text
        for name, values in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
            found.setdefault(name, []).extend(cast(list[Any], values))
    assert text == own.text
    assert own.prompt_logprobs is not None
    assert own.logprobs is not None
    expected = [None if one is None else one.logprob for one in (*own.prompt_logprobs, *own.logprobs)]
    assert found["token_logprobs"] == pytest.approx(expected)
    assert len(found["tokens"]) == len(found["text_offset"]) == len(PROMPT) + 4
    assert found["text_offset"][: len(PROMPT)] == list(range(len(PROMPT))), "one character a token"
    assert found["top_logprobs"][0] is None


async def test_max_tokens_0_with_echo_is_the_prompt_alone(front: Front) -> None:
    whole = await front.complete(PROMPT, max_tokens=0, echo=True, logprobs=0)
    (choice,) = whole.choices
    assert (choice.text, len(choice.logprobs.token_logprobs)) == (PROMPT, len(PROMPT))
    assert whole.usage.completion_tokens == 0


async def test_a_chats_log_probabilities_have_bytes(front: Front) -> None:
    own = await front.cluster.client.chat(MESSAGES, max_tokens=4, logprobs=3, ignore_eos=True).collect()
    whole = await front.chat(MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3)
    assert own.logprobs is not None
    for entry, one in zip(whole.choices[0].logprobs.content, own.logprobs, strict=True):
        assert entry.logprob == pytest.approx(one.logprob)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([logprob for _, logprob in one.top])
        assert shown(bytes(entry.bytes)) == entry.token


async def test_texts_become_tokens_and_come_back(front: Front) -> None:
    found = (await front.http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True})).json()
    assert found["count"] == len(found["tokens"]) == len(PROMPT)
    assert found["token_strs"] == list(PROMPT)
    back = (await front.http.post("/detokenize", json={"tokens": found["tokens"]})).json()
    assert back["prompt"] == PROMPT
    chat = (await front.http.post("/tokenize", json={"messages": MESSAGES})).json()
    model = await front.cluster.client.model()
    assert (chat["tokens"], chat["max_model_len"]) == (model.encode_chat(MESSAGES), model.max_model_len)


async def test_the_other_routes_list_the_models_and_the_state_of_the_cluster(front: Front) -> None:
    assert (await front.openai.models.retrieve(front.model)).id == front.model
    with pytest.raises(openai.NotFoundError):
        await front.openai.models.retrieve("gpt-4")
    assert (await front.http.get("/health")).json() == {"status": "ok", "workers": 1}
    (worker,) = (await front.http.get("/server_info")).json()["workers"]
    assert worker["serving"]
    assert (await front.http.get("/load")).json() == {"server_load": 0}


async def test_readers_that_leave_hold_nothing(front: Front) -> None:
    """Streams cut by their readers, early and late, alone and n at a time: all blocks come back, and every law holds."""

    async def load() -> int:
        return int((await front.http.get("/load")).json()["server_load"])

    for number in range(12):
        stream = await front.complete(PROMPT, max_tokens=4000, stream=True, n=1 + number % 3)
        for _ in range(number % 4):
            await anext(aiter(stream))
        await stream.close()
    waiting = asyncio.create_task(front.complete(PROMPT, max_tokens=4000))
    while not await load():
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await front.cluster.until_idle()
    while await load():
        await asyncio.sleep(0.01)
    assert (await front.cluster.client.check()).violations == []


def listen_with_small_buffers(host: str, port: int, backlog: int) -> socket.socket:
    """What is sent and not taken fills them soon: some megabytes have to be computed otherwise."""
    listening = listen(host, port, backlog=backlog)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of each connection too
    return listening


async def test_a_reader_that_stays_and_takes_nothing_loses_its_answers(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket's buffers are full; another one, who reads, gets all."""
    monkeypatch.setattr("kvpool.gateway.server.listen", listen_with_small_buffers)
    async with (
        serving(f"127.0.0.1:{front.cluster.manager.port}", reader_seconds=0.3) as gateway,
        http_client(gateway.url) as client,
    ):
        loop = asyncio.get_running_loop()
        with socket.socket() as sleeper:
            sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sleeper.setblocking(False)
            await loop.sock_connect(sleeper, ("127.0.0.1", gateway.port))
            asked = completion(prompt="abc", max_tokens=400, n=8, ignore_eos=True, logprobs=20, stream=True)
            await loop.sock_sendall(sleeper, asked)

            async def is_ended() -> bool:
                return 'connections_ended_total{limit="reader"} 1.0' in (await client.get("/metrics")).text

            assert len((await front.cluster.complete("abc", max_tokens=8)).token_ids) == 8
            await eventually(is_ended, "the reader's connection is closed")
            await front.cluster.until_idle()
            assert (await client.get("/load")).json() == {"server_load": 0}

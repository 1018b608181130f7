"""Tokens reach their readers while the next step runs, and a text that turns out to have ended leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from kvpool.worker_service.engine.detokenizer import TextDecoder
from kvpool.worker_service.engine.errors import ErrorKind
from kvpool.worker_service.engine.request import Request
from kvpool.worker_service.engine.stream import EndReason
from tests.tracer import VOCAB_SIZE, expected_text
from tests.worker_service.world import World, failed, read, read_right

PROMPT = [1, 2, 3]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """One word per token."""
    return Tokenizer(models.WordLevel({f"w{token}.": token for token in range(VOCAB_SIZE)}, unk_token="w0."))


def noted(order: list[str], what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*arguments: Any) -> Any:
        order.append(what)
        return call(*arguments)

    return noting


async def test_tokens_are_passed_on_after_the_next_step_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_blocks=100, block_size=4)
    order: list[str] = []
    thread = world.engine._model_thread
    monkeypatch.setattr(thread, "submit", noted(order, "launch", thread.submit))
    monkeypatch.setattr(Request, "deliver", noted(order, "deliver", Request.deliver))
    async with world.running():
        await read_right(world.submit(PROMPT, 3))
    assert order == ["launch", "launch", "deliver", "launch", "deliver", "deliver"]


async def test_no_step_is_computed_after_the_last_token_or_an_id_that_ends_the_text() -> None:
    text = expected_text(PROMPT, 9)
    async with World(num_blocks=100, block_size=4).running() as world:
        await read_right(world.submit(PROMPT, 9))
        assert world.model.num_steps == 9
        ended = world.submit(PROMPT, 9, stop_token_ids=frozenset({text[4]}))
        first = text.index(text[4])
        assert await read(ended) == text[:first]
        assert ended.finish_reason is EndReason.STOP
        assert world.model.num_steps == 9 + first + 1


@pytest.mark.parametrize("num_tokens", [1, 4, 9])
async def test_a_stop_string_ends_a_request_whose_next_step_runs(tokenizer: Tokenizer, num_tokens: int) -> None:
    """The token of that step reaches nobody, its blocks come back, and others have their texts."""
    text = expected_text(PROMPT, 9)
    world = World(num_blocks=100, block_size=4)
    world.engine.tokenizer = tokenizer
    async with world.running():
        others = [world.submit([number, 5], 12) for number in range(3)]
        stopped = world.submit(PROMPT, 9, stop_strings=(f"w{text[num_tokens - 1]}.",))
        first = text.index(text[num_tokens - 1])
        assert await read(stopped) == text[: first + 1]
        assert stopped.finish_reason is EndReason.STOP
        assert stopped.usage().num_generated_tokens == first + 1
        await read_right(*others)
    assert world.engine.stats.ended == {"stop": 1, "length": 3}


@pytest.mark.parametrize("num_tokens", [2, 3])
async def test_a_token_that_cannot_be_decoded_ends_its_request_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """Also if it is the last one, after which the request runs no longer."""
    text = expected_text(PROMPT, 3)
    add = TextDecoder.add

    def broken(decoder: TextDecoder, token_id: int) -> str:
        if token_id == text[num_tokens - 1]:
            raise ValueError("no such token")
        return add(decoder, token_id)

    monkeypatch.setattr(TextDecoder, "add", broken)
    world = World(num_blocks=100, block_size=4)
    world.engine.tokenizer = tokenizer
    async with world.running():
        tokens, error = await failed(world.submit(PROMPT, 3))
        assert tokens == text[: num_tokens - 1]
        assert error.kind is ErrorKind.INTERNAL
    assert world.engine.stats.ended == {"internal": 1}

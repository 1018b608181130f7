"""Texts that are too long are refused before they are tokenised, and the others that are long are tokenised one at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from kvpool.client.encoding import LONG_CHARACTERS, Encoding, num_characters
from kvpool.client.errors import InvalidRequest
from kvpool.client.model import Model
from kvpool.protocol import text_bound
from kvpool.v1 import worker_pb2
from tests.until import until

MAX_MODEL_LEN = 64
TEMPLATE = "{{ messages[-1].content[:20] }}"
"""Which leaves out most of a chat."""


def model(**facts: Any) -> Model:
    """A token for each character, or byte of one."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    given = {"model_name": "tiny", "vocab_size": 256, "max_model_len": MAX_MODEL_LEN, **facts}
    files: dict[int, bytes] = {
        worker_pb2.MODEL_FILE_TOKENIZER: tokenizer.to_str().encode(),
        worker_pb2.MODEL_FILE_CHAT_TEMPLATE: TEMPLATE.encode(),
    }
    return Model.from_parts(worker_pb2.ModelFacts(**given), files)


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


ENCODES: dict[str, Callable[[Model, str], list[int]]] = {
    "prompt": lambda model, text: model.encode_prompt(text),
    "text": lambda model, text: model.encode_text(text),
    "chat": lambda model, text: model.encode_chat(chat(text)),
    "unchecked chat": lambda model, text: model.encode_chat(chat(text), check=False),
}


class Untouched:
    """A tokenizer that may be measured and not asked for tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        assert "encode" not in name, "the text was tokenised"
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("name", ENCODES)
@pytest.mark.parametrize("has_encoder", [False, True])
def test_a_text_that_certainly_does_not_fit_is_not_tokenised(name: str, has_encoder: bool) -> None:
    if has_encoder and "chat" in name:
        return
    facts = {"is_encoder_decoder": True, "max_encoder_tokens": MAX_MODEL_LEN, "max_model_len": 1 << 20}
    known = model(**(facts if has_encoder else {}))
    object.__setattr__(known, "tokenizer", Untouched(known.tokenizer))
    with pytest.raises(InvalidRequest, match=r"shorten") as raised:
        ENCODES[name](known, "a" * (text_bound.MIN_SHORTENED_BYTES + 1))
    assert raised.value.reason == "NEVER_FITS"


def test_a_text_that_may_fit_is_tokenised_and_counted() -> None:
    known = model()
    assert len(known.encode_prompt("é" * (MAX_MODEL_LEN // 2 - 1))) == MAX_MODEL_LEN - 2
    with pytest.raises(InvalidRequest, match=f"has {MAX_MODEL_LEN + 1} tokens"):
        known.encode_prompt("a" * (MAX_MODEL_LEN + 1))
    assert len(known.encode_text("a" * 100_000)) == 100_000
    assert len(known.encode_chat(chat("a" * 100_000))) == 20


def test_a_prompt_keeps_the_space_around_it() -> None:
    prompt = "  the\tcat\r\n "
    assert len(model().encode_prompt(prompt)) == len(prompt)


def test_a_tokenizer_that_may_drop_text_is_given_more() -> None:
    known = model()
    assert known.tokenizer is not None
    known.tokenizer.normalizer = normalizers.Strip()
    assert len(known.encode_prompt(" " * 100_000 + "a")) == 1


def test_all_text_of_messages_counts() -> None:
    parts = [{"type": "text", "text": "abc"}, {"type": "text", "text": "de"}]
    assert num_characters([{"role": "user", "content": parts, "n": 1}]) == len(
        "roleuserncontent" + 2 * "typetexttext" + "abcde"
    )


async def test_long_texts_are_encoded_one_at_a_time_and_short_ones_beside_them() -> None:
    encoding = Encoding()
    begun: list[str] = []
    ends = {name: threading.Event() for name in "abc"}

    def work(name: str) -> str:
        begun.append(name)
        assert ends[name].wait(20)
        return name

    tasks = {}
    for name in "abc":
        tasks[name] = asyncio.create_task(encoding.run(LONG_CHARACTERS, partial(work, name)))
        await until(lambda: begun == ["a"])
        assert await encoding.run(1, lambda: "short") == "short"
    tasks["a"].cancel()
    tasks["b"].cancel()
    await asyncio.gather(tasks["a"], tasks["b"], return_exceptions=True)
    assert await encoding.run(1, lambda: "short") == "short"
    assert begun == ["a"], "its thread has not ended"
    ends["a"].set()
    await until(lambda: begun == ["a", "c"])
    ends["c"].set()
    assert await tasks["c"] == "c"


async def test_what_fails_makes_room_for_the_next() -> None:
    encoding = Encoding()

    def fail() -> str:
        raise InvalidRequest("too long")

    for _ in range(3):
        with pytest.raises(InvalidRequest):
            await encoding.run(LONG_CHARACTERS, fail)
    assert await encoding.run(LONG_CHARACTERS, lambda: "next") == "next"

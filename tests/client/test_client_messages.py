"""What a caller may pass as a prompt or as messages, and what is said of the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvpool.client import Client, ClientConfig, InvalidRequest
from kvpool.client.messages import as_messages
from tests.client.clients import quick
from tests.client.fakes import FakeWorker, fake_cluster

UNREACHABLE = ClientConfig(manager="127.0.0.1:1")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "got str; use generate"),
        ({"role": "user", "content": "hi"}, "got dict"),
        (7, "got int"),
        ([], "at least one message"),
        (["hi"], "message 0 needs a role"),
        ([{"role": "", "content": "hi"}], "message 0 needs a role"),
        ([{"role": 3, "content": "hi"}], "message 0 needs a role"),
        ([{"role": "user"}, {"content": "hi"}], "message 1 needs a role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"message 0 has a part that is no text \(image_url\)"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "message 0 has a part that is no text;"),
        ([{"role": "user", "content": ["hi"]}], "message 0 has a part that is no text"),
        ([{"role": "user", "content": [{"type": "text", "text": 7}]}], "message 0 has a part that is no text"),
    ],
)
async def test_messages_that_make_no_sense_are_refused_at_once(messages: Any, words: str) -> None:
    """Before anything is sent: no manager answers here."""
    async with Client(config=UNREACHABLE) as client:
        with pytest.raises(InvalidRequest, match=words):
            client.chat(messages)


def test_messages_are_kept_but_for_what_is_null() -> None:
    """Also in tool calls. Roles and other keys are the template's to know, reasoning has all of its names, and a refusal is text.
    The caller's messages are not changed."""
    parts = [{"type": "text", "text": "one"}, {"type": "refusal", "refusal": "two"}]
    call = {"id": None, "function": {"name": "f", "arguments": None}}
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": parts, "name": "n"},
        {"role": "critic", "content": None, "reasoning": "so", "tool_calls": [call]},
    ]
    before = copy.deepcopy(asked)
    texts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert as_messages(asked) == (
        {"role": "user", "content": texts, "name": "n"},
        {
            "role": "critic",
            "tool_calls": [{"function": {"name": "f"}}],
            "reasoning": "so",
            "reasoning_content": "so",
            "thinking": "so",
        },
    )
    assert asked == before


async def test_a_prompt_that_is_not_utf_8_is_refused() -> None:
    """As Python reads an argument that is not: with a surrogate for each byte."""
    async with fake_cluster(FakeWorker("w")) as manager, quick(manager) as client:
        with pytest.raises(InvalidRequest, match=r"no valid text at character 3 \('\\udcff'\)"):
            await client.generate("abc\udcff").collect()

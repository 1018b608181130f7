"""Messages as OpenAI's API has them are checked, and come to every template in the shape that it reads.

The oracle is transformers' apply_chat_template, given messages of that shape.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvpool.client import Client, ClientConfig, InvalidRequest
from kvpool.client.chat_template import ChatTemplate
from kvpool.client.messages import as_messages
from kvpool.client.template_process import TemplateProcess

Messages = list[dict[str, Any]]
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<e>")

LOOP = "{% for p in m['content'] %}{% if p['type'] == 'text' %}<{{ p['text'] }}>{% endif %}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.name }} ARGUMENTS){% endfor %}"
REASONING = "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"


def source_of(content: str, arguments: str) -> str:
    """A template that has all that a message may have."""
    calls = CALLS.replace("ARGUMENTS", arguments)
    named = "{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}{{ m.tool_call_id or '' }}:"
    return "{% for m in messages %}" + named + REASONING + content + calls + "{% endfor %}{{ eos_token }}"


def call(arguments: Any = '{"a": 1, "b": ["x"]}', **more: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


HI = {"role": "user", "content": "Hi"}
MAY_BE_NULL = ("name", "refusal", "audio", "function_call", "tool_calls", "annotations", "reasoning_content")
ALL_NULL = dict.fromkeys(MAY_BE_NULL)
CONVERSATIONS: dict[str, Messages] = {
    "a text": [HI],
    "an empty text": [{"role": "user", "content": ""}, HI],
    "parts": [{"role": "user", "content": text("Hi")}],
    "two parts": [{"role": "user", "content": text("Hi", "there")}],
    "no parts": [HI, {"role": "assistant", "content": []}, HI],
    "parts for each role": [
        {"role": "system", "content": text("Be")},
        {"role": "user", "content": text("Hi")},
        {"role": "assistant", "content": text("Yes")},
        {"role": "tool", "tool_call_id": "1", "content": text("42")},
    ],
    "null for all that may be": [{"role": "system", "content": "Be", **ALL_NULL}, {**HI, **ALL_NULL}],
    "content null": [HI, {"role": "assistant", "content": None, **ALL_NULL}, HI],
    "content absent": [HI, {"role": "assistant"}, HI],
    "null next to tool calls": [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ],
    "absent next to tool calls": [HI, {"role": "assistant", "tool_calls": [call(), call("{}")]}, HI],
    "text next to tool calls": [HI, {"role": "assistant", "content": "So", "tool_calls": [call(index=None)]}],
    "no tool calls": [HI, {"role": "assistant", "content": "So", "tool_calls": []}],
    "refused": [HI, {"role": "assistant", "content": None, "refusal": "No"}, HI],
    "a name": [{**HI, "name": "Ann"}],
    "a developer": [{"role": "developer", "content": "Be"}, HI],
    "another role": [{"role": "critic", "content": "Be"}, HI],
    "reasoning": [HI, {"role": "assistant", "content": None, "reasoning_content": "hm"}, HI],
    "reasoning by its older name": [HI, {"role": "assistant", "content": "Yes", "reasoning": "hm"}, HI],
}


def oracle(source: str, messages: Messages) -> str:
    """What transformers makes of messages that have the shape that the template reads."""
    rendered = TOKENIZER.apply_chat_template(messages, chat_template=source, tokenize=False)
    assert isinstance(rendered, str)
    return rendered


def rendered(process: TemplateProcess, source: str, messages: Messages, **arguments: Any) -> str:
    template = ChatTemplate(source, {"eos_token": "<e>"}, process=process)
    return template.render(as_messages(messages), add_generation_prompt=False, arguments=arguments)


def with_contents(messages: Messages, kind: type, shape: Callable[[Any], object]) -> Messages:
    return [
        {**one, "content": shape(one["content"])} if isinstance(one.get("content"), kind) else one for one in messages
    ]


def as_they_are(messages: Messages) -> Messages:
    return messages


def as_text(messages: Messages) -> Messages:
    """With line breaks between parts."""
    return with_contents(messages, list, lambda parts: "\n".join(part["text"] for part in parts))


def as_parts(messages: Messages) -> Messages:
    return with_contents(messages, str, text)


def as_mappings(messages: Messages) -> Messages:
    found = copy.deepcopy(messages)
    for message in found:
        for one in message.get("tool_calls") or ():
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    return found


CONTENTS = {
    "prints": ("{{ m.content }}", as_text),
    "trims": ("{{ m['content'] | trim }}", as_text),
    "shouts": ("{{ m.content | upper }}", as_text),
    "joins": ("{{ (m.content or '') + '' }}", as_text),
    "asks whether it is there": ("{% if m.content %}{{ m.content }}{% else %}-{% endif %}", as_text),
    "asks for the key": ("{% if 'content' in m and m['content'] is not none %}{{ m['content'] }}{% endif %}", as_text),
    "loops": (LOOP, as_parts),
    "takes the first": ("{{ m.content[0].text }}", as_parts),
    "asks first": ("{% if m.content %}" + LOOP + "{% endif %}", as_parts),
    "asks for its kind": ("{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}", as_they_are),
}
"""How a template reads a content, and the shape that this needs."""
TOOL_ARGUMENTS = {
    "print": ("{{ c.function.arguments }}", as_they_are),
    "kind": (
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
        as_they_are,
    ),
    "items": ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}", as_mappings),
    "method": ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}", as_mappings),
    "tojson": ("{{ c.function.arguments | tojson }}", as_mappings),
    "tojson of all": ("{{ c.function | tojson }}", as_mappings),
}
"""How a template reads the arguments of a tool call, which are JSON text in OpenAI's API, and the shape that this needs."""


@pytest.mark.parametrize(
    ("content", "arguments"),
    [
        *((content, "print") for content in CONTENTS),
        *((content, arguments) for content in ("prints", "loops", "joins") for arguments in TOOL_ARGUMENTS),
    ],
)
def test_a_template_gets_the_shape_that_it_reads(process: TemplateProcess, content: str, arguments: str) -> None:
    """Arguments may be sent as a mapping too, which a template that reads text would print as Python writes it."""
    content_source, content_shape = CONTENTS[content]
    arguments_source, arguments_shape = TOOL_ARGUMENTS[arguments]
    source = source_of(content_source, arguments_source)
    for name, messages in CONVERSATIONS.items():
        if content == "takes the first" and not all(message.get("content") for message in messages):
            continue  # transformers fails: there is no first part
        expected = oracle(source, arguments_shape(content_shape(messages)))
        assert rendered(process, source, messages) == expected, name
        assert rendered(process, source, as_mappings(messages)) == expected, name


def test_roles_may_be_read_in_different_shapes(process: TemplateProcess) -> None:
    begin = "{% if messages[0].role == 'system' %}{{ 'S ' + messages[0].content }}{% endif %}"
    source = begin + "{% for m in messages if m.role != 'system' %}" + LOOP + "{% endfor %}"
    system = "{% if m.role == 'system' %}" + LOOP
    reverse = "{% for m in messages %}" + system + "{% else %}{{ m.content + '.' }}{% endif %}{% endfor %}"
    conversation = [{"role": "system", "content": "Be"}, HI]
    for messages in (conversation, as_parts(conversation)):
        assert rendered(process, source, messages) == "S Be<Hi>"
        assert rendered(process, reverse, messages) == "<Be>Hi."


def test_arguments_that_are_no_object_are_refused_where_a_mapping_is_read(process: TemplateProcess) -> None:
    """No arguments are the empty object: clients send them as an empty text."""
    source = source_of("{{ m.content }}", TOOL_ARGUMENTS["items"][0])
    assert rendered(process, source, [{"role": "assistant", "tool_calls": [call("")]}]).endswith("(f )<e>")
    for arguments in ("[1]", "{", "null", "[" * 100_000):
        with pytest.raises(InvalidRequest, match="message 1 has a tool call whose arguments are no JSON object"):
            rendered(process, source, [HI, {"role": "assistant", "tool_calls": [call(arguments)]}])


def test_a_content_that_is_not_there_is_no_failure(process: TemplateProcess) -> None:
    """Of a template that joins it to other text, where transformers fails."""
    source = "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"
    for name in ("null next to tool calls", "absent next to tool calls", "content null"):
        assert rendered(process, source, CONVERSATIONS[name]).startswith("[Hi][][")


@pytest.mark.parametrize("otherwise", ["", "{{ raise_exception('unknown role') }}"], ids=["drops", "refuses"])
def test_a_developer_is_the_system_to_a_template_that_does_not_know_the_role(
    process: TemplateProcess, otherwise: str
) -> None:
    known = "{% if m.role in ('system', 'user') %}{{ m.role }}:{{ m.content }};{% else %}" + otherwise + "{% endif %}"
    source = "{% for m in messages %}" + known + "{% endfor %}"
    assert rendered(process, source, CONVERSATIONS["a developer"]) == "system:Be;user:Hi;"


def test_what_one_conversation_does_to_a_template_does_not_change_the_next(process: TemplateProcess) -> None:
    """Shapes are remembered, not for other variables or after a failure; no text of a user is a mark."""
    loop = "{% for m in messages %}{% if m.plain or plain %}{{ m.content }}{% else %}" + LOOP + "{% endif %}"
    template = ChatTemplate(loop + "{{ m.name + '' if m.name }}{% endfor %}", {}, process=process)
    assert template.render(as_messages([HI]), arguments={"plain": True}) == "Hi"
    assert template.render(as_messages([{**HI, "plain": True}])) == "Hi"
    with pytest.raises(InvalidRequest):
        template.render(as_messages([{**HI, "name": 7}]))
    assert template.render(as_messages([{**HI, "name": "w0z"}])) == "<Hi>w0z"
    assert template.render(as_messages([HI])) == "<Hi>"
    assert template.render(as_messages([{"role": "user", "content": "you"}])) == "<you>"


# -- what a caller may pass as messages


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
    async with Client(config=ClientConfig(manager="127.0.0.1:1")) as client:
        with pytest.raises(InvalidRequest, match=words):
            client.chat(messages)


def test_messages_are_kept_but_for_what_is_null() -> None:
    """Roles and other keys are the template's to know, reasoning has all its names, and a refusal is text."""
    parts = [{"type": "text", "text": "one"}, {"type": "refusal", "refusal": "two"}]
    nulls = {"id": None, "function": {"name": "f", "arguments": None}}
    asked: Messages = [
        {"role": "user", "content": parts, "name": "n"},
        {"role": "critic", "content": None, "reasoning": "so", "tool_calls": [nulls]},
    ]
    before = copy.deepcopy(asked)
    assert as_messages(asked) == (
        {"role": "user", "content": text("one", "two"), "name": "n"},
        {
            "role": "critic",
            "tool_calls": [{"function": {"name": "f"}}],
            "reasoning": "so",
            "reasoning_content": "so",
            "thinking": "so",
        },
    )
    assert asked == before

"""litellm: chats and texts, whole and streamed, by its synchronous and its asynchronous functions; what it makes of a refusal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches a list of prices

import litellm


def answer(text: str, usage: Any) -> dict[str, Any]:
    """An answer in the form that all drivers print."""
    return {
        "text": text,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
    }


def refused(**arguments: Any) -> dict[str, Any]:
    """The exception that a call ends with."""
    try:
        litellm.completion(**arguments)
    except litellm.BadRequestError as error:
        return {"exception": type(error).__name__, "status": error.status_code, "message": str(error)}
    return {"exception": "none"}


job = json.load(sys.stdin)
limits = {"api_base": job["base_url"], "api_key": "any", "temperature": 0, "max_tokens": job["max_tokens"]}
chat = {**limits, "model": f"openai/{job['model']}", "messages": job["messages"], "max_retries": 0}
text = {**limits, "model": f"text-completion-openai/{job['model']}", "prompt": job["prompt"]}
streamed = {"stream": True, "stream_options": {"include_usage": True}}


def chat_streamed() -> dict[str, Any]:
    """A streamed chat."""
    chunks = list(litellm.completion(**chat, **streamed))
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    return answer(said, chunks[-1].usage)


async def chat_async() -> dict[str, Any]:
    """A chat by the asynchronous function."""
    whole = await litellm.acompletion(**chat)
    return answer(whole.choices[0].message.content, whole.usage)


def text_whole() -> dict[str, Any]:
    """A text."""
    whole = litellm.text_completion(**text)
    return answer(whole.choices[0].text, whole.usage)


def text_streamed() -> dict[str, Any]:
    """A streamed text."""
    chunks = list(litellm.text_completion(**text, **streamed))
    said = "".join(choice.text or "" for chunk in chunks for choice in chunk.choices)
    return answer(said, next(chunk.usage for chunk in reversed(chunks) if getattr(chunk, "usage", None)))


whole = litellm.completion(**chat)
tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
seen = {
    "chats": [answer(whole.choices[0].message.content, whole.usage), chat_streamed(), asyncio.run(chat_async())],
    "texts": [text_whole(), text_streamed()],
    "refused": {
        "tools": refused(**chat, tools=[tool]),
        "response_format": refused(**chat, response_format={"type": "json_object"}),
    },
}
print(f"\n{json.dumps(seen)}")

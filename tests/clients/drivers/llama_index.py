"""llama-index's OpenAILike: chats and texts, whole and streamed; what it makes of a refusal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

job = json.load(sys.stdin)
options: dict[str, Any] = {
    "model": job["model"],
    "api_base": job["base_url"],
    "api_key": "any",
    "context_window": 2048,
    "temperature": 0,
    "max_tokens": job["max_tokens"],
    "max_retries": 0,
}
chat = OpenAILike(**options, is_chat_model=True, is_function_calling_model=True)
text = OpenAILike(**options, is_chat_model=False)
messages = [ChatMessage(role=message["role"], content=message["content"]) for message in job["messages"]]
with_usage: dict[str, Any] = {"stream_options": {"include_usage": True}}


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def answer(text: str, usage: Any) -> dict[str, Any]:
    """An answer in the form that all drivers print."""
    return {
        "text": text,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
    }


def refused(ask: Callable[[], Any]) -> dict[str, Any]:
    """The exception that a call ends with."""
    try:
        ask()
    except openai.BadRequestError as error:
        return {
            "exception": type(error).__name__,
            "status": error.status_code,
            "param": error.param,
            "message": str(error),
        }
    return {"exception": "none"}


whole = chat.chat(messages)
streamed = list(chat.stream_chat(messages, **with_usage))
text_whole = text.complete(job["prompt"])
text_streamed = list(text.stream_complete(job["prompt"], **with_usage))
seen = {
    "chats": [
        answer(whole.message.content or "", whole.raw.usage),
        answer("".join(part.delta or "" for part in streamed), streamed[-1].raw.usage),
    ],
    "texts": [
        answer(text_whole.text, text_whole.raw.usage),
        answer("".join(part.delta or "" for part in text_streamed), text_streamed[-1].raw.usage),
    ],
    "refused": {
        "tools": refused(lambda: chat.chat_with_tools([FunctionTool.from_defaults(weather)], "What is the weather?")),
        "response_format": refused(lambda: chat.chat(messages, response_format={"type": "json_object"})),
    },
}
print(f"\n{json.dumps(seen)}")

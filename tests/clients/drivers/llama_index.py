"""llama-index's OpenAILike: chats and texts, whole and streamed; what it makes of a refusal."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def answer(text: str, last: Any) -> tuple[Any, ...]:
    usage = last.raw.usage
    return text, usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens


async def drive(job: Any) -> dict[str, Any]:
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

    whole = chat.chat(messages)
    streamed = list(chat.stream_chat(messages, **with_usage))
    whole_text = text.complete(job["prompt"])
    streamed_text = list(text.stream_complete(job["prompt"], **with_usage))
    tools = [FunctionTool.from_defaults(weather)]
    return {
        "chats": [
            answer(whole.message.content or "", whole),
            answer("".join(part.delta or "" for part in streamed), streamed[-1]),
        ],
        "texts": [
            answer(whole_text.text, whole_text),
            answer("".join(part.delta or "" for part in streamed_text), streamed_text[-1]),
        ],
        "refused": {
            "tools": lambda: chat.chat_with_tools(tools, "What is the weather?"),
            "response_format": lambda: chat.chat(messages, response_format={"type": "json_object"}),
        },
    }

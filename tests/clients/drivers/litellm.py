"""litellm: chats and texts, whole and streamed, by its synchronous and its asynchronous functions; what it makes of a refusal."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches a list of prices

import litellm


def answer(text: str, usage: Any) -> tuple[Any, ...]:
    return text, usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens


def chat_answer(whole: Any) -> tuple[Any, ...]:
    return answer(whole.choices[0].message.content, whole.usage)


async def drive(job: Any) -> dict[str, Any]:
    limits = {"api_base": job["base_url"], "api_key": "any", "temperature": 0, "max_tokens": job["max_tokens"]}
    chat = {**limits, "model": f"openai/{job['model']}", "messages": job["messages"], "max_retries": 0}
    text = {**limits, "model": f"text-completion-openai/{job['model']}", "prompt": job["prompt"]}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}

    whole = litellm.completion(**chat)
    chunks = list(litellm.completion(**chat, **streamed))
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    whole_text = litellm.text_completion(**text)
    text_chunks = list(litellm.text_completion(**text, **streamed))
    continued = "".join(choice.text or "" for chunk in text_chunks for choice in chunk.choices)
    usage = next(chunk.usage for chunk in reversed(text_chunks) if getattr(chunk, "usage", None))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    return {
        "chats": [chat_answer(whole), answer(said, chunks[-1].usage), chat_answer(await litellm.acompletion(**chat))],
        "texts": [answer(whole_text.choices[0].text, whole_text.usage), answer(continued, usage)],
        "refused": {
            "tools": partial(litellm.completion, **chat, tools=[tool]),
            "response_format": partial(litellm.completion, **chat, response_format={"type": "json_object"}),
        },
    }

"""langchain-openai: chats and texts, whole and streamed; what it makes of a refusal."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class City(BaseModel):
    """An answer that is not plain text."""

    name: str


def answer(message: Any) -> dict[str, Any]:
    """An answer in the form that all drivers print."""
    usage = message.usage_metadata
    return {
        "text": message.content,
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "cached_tokens": usage["input_token_details"]["cache_read"],
    }


def refused(ask: Callable[[], Any]) -> dict[str, Any]:
    """The exception that a call ends with."""
    try:
        ask()
    except openai.BadRequestError as error:
        return {"status": error.status_code, "param": error.param, "message": str(error)}
    return {"status": 200, "param": None, "message": ""}


job = json.load(sys.stdin)
options = {"base_url": job["base_url"], "api_key": "any", "model": job["model"], "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**options, max_tokens=job["max_tokens"], stream_usage=True)
text = OpenAI(**options, max_tokens=job["max_tokens"])
messages = [(message["role"], message["content"]) for message in job["messages"]]


def chat_streamed() -> dict[str, Any]:
    """The chunks of a streamed chat, which langchain adds up."""
    whole: Any = None
    for chunk in chat.stream(messages):
        whole = chunk if whole is None else whole + chunk
    return answer(whole)


seen = {
    "chat": answer(chat.invoke(messages)),
    "chat_streamed": chat_streamed(),
    "chat_async": answer(asyncio.run(chat.ainvoke(messages))),
    "text": text.invoke(job["prompt"]),
    "text_streamed": "".join(text.stream(job["prompt"])),
    "tools": refused(lambda: chat.bind_tools([City]).invoke(messages)),
    "function_calling": refused(lambda: chat.with_structured_output(City, method="function_calling").invoke(messages)),
    "json_schema": refused(lambda: chat.with_structured_output(City, method="json_schema").invoke(messages)),
    "json_mode": refused(lambda: chat.with_structured_output(City, method="json_mode").invoke(messages)),
}
print(f"\n{json.dumps(seen)}")

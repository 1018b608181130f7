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
        return {
            "exception": type(error).__name__,
            "status": error.status_code,
            "param": error.param,
            "message": str(error),
        }
    return {"exception": "none"}


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


def refused_structured(method: Any) -> dict[str, Any]:
    """The exception for an answer of a schema that is asked for in this way."""
    return refused(lambda: chat.with_structured_output(City, method=method).invoke(messages))


seen = {
    "chats": [answer(chat.invoke(messages)), chat_streamed(), answer(asyncio.run(chat.ainvoke(messages)))],
    # langchain drops the details of the usage of a text
    "texts": [text.invoke(job["prompt"]), "".join(text.stream(job["prompt"]))],
    "refused": {
        "tools": refused(lambda: chat.bind_tools([City]).invoke(messages)),
        **{method: refused_structured(method) for method in ("function_calling", "json_schema", "json_mode")},
    },
}
print(f"\n{json.dumps(seen)}")

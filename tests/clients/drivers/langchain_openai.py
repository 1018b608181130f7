"""langchain-openai: chats and texts, whole and streamed; what it makes of a refusal."""

from __future__ import annotations

from functools import partial
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import create_model

CITY = create_model("City", name=(str, ...))


def answer(message: Any) -> tuple[Any, ...]:
    usage = message.usage_metadata
    return message.content, usage["input_tokens"], usage["output_tokens"], usage["input_token_details"]["cache_read"]


async def drive(job: Any) -> dict[str, Any]:
    options = {"base_url": job["base_url"], "api_key": "any", "model": job["model"], "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**options, max_tokens=job["max_tokens"], stream_usage=True)
    text = OpenAI(**options, max_tokens=job["max_tokens"])
    messages = [(message["role"], message["content"]) for message in job["messages"]]

    def ask_structured(method: Any) -> None:
        chat.with_structured_output(CITY, method=method).invoke(messages)

    whole = chat.invoke(messages)
    first, *others = chat.stream(messages)
    return {
        # langchain adds up the chunks of a streamed chat
        "chats": [answer(whole), answer(sum(others, start=first)), answer(await chat.ainvoke(messages))],
        # langchain drops the details of the usage of a text
        "texts": [text.invoke(job["prompt"]), "".join(text.stream(job["prompt"]))],
        "refused": {
            "tools": lambda: chat.bind_tools([CITY]).invoke(messages),
            **{method: partial(ask_structured, method) for method in ("function_calling", "json_schema", "json_mode")},
        },
    }

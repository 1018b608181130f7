"""pydantic-ai: an agent's answers, whole and streamed; what it makes of a refusal."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, ModelSettings, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """An answer that is not plain text."""

    name: str


job = json.load(sys.stdin)
model = OpenAIChatModel(job["model"], provider=OpenAIProvider(base_url=job["base_url"], api_key="any"))
system, question = (message["content"] for message in job["messages"])
settings = ModelSettings(temperature=0, max_tokens=job["max_tokens"])


def answer(text: str, usage: Any) -> dict[str, Any]:
    """An answer in the form that all drivers print."""
    return {
        "text": text,
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "cached_tokens": usage.cache_read_tokens,
    }


def agent(**more: Any) -> Agent[None, Any]:
    """An agent without memory."""
    return Agent(model, system_prompt=system, model_settings=settings, **more)


async def refused(asked: Agent[None, Any]) -> dict[str, Any]:
    """The exception that a run ends with."""
    try:
        await asked.run(question)
    except ModelHTTPError as error:
        body: Any = error.body
        return {
            "exception": type(error).__name__,
            "status": error.status_code,
            "param": body["param"],
            "message": str(error),
        }
    return {"exception": "none"}


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


async def main() -> dict[str, Any]:
    """What was seen."""
    whole = await agent().run(question)
    text = ""
    async with agent().run_stream(question) as streamed:
        async for part in streamed.stream_text(delta=True):
            text += part
        usage = streamed.usage
    return {
        "chats": [answer(whole.output, whole.usage), answer(text, usage)],
        "refused": {
            "tools": await refused(agent(tools=[weather])),
            "output_tool": await refused(agent(output_type=City)),
            "output_schema": await refused(agent(output_type=NativeOutput(City))),
        },
    }


print(f"\n{json.dumps(asyncio.run(main()))}")

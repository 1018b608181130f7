"""pydantic-ai: an agent's answers, whole and streamed; what it makes of a refusal."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import create_model
from pydantic_ai import Agent, ModelSettings, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

CITY = create_model("City", name=(str, ...))


def answer(text: str, usage: Any) -> tuple[Any, ...]:
    return text, usage.input_tokens, usage.output_tokens, usage.cache_read_tokens


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


async def drive(job: Any) -> dict[str, Any]:
    model = OpenAIChatModel(job["model"], provider=OpenAIProvider(base_url=job["base_url"], api_key="any"))
    system, question = (message["content"] for message in job["messages"])
    settings = ModelSettings(temperature=0, max_tokens=job["max_tokens"])

    def agent(**more: Any) -> Agent[None, Any]:
        return Agent(model, system_prompt=system, model_settings=settings, **more)

    whole = await agent().run(question)
    text = ""
    async with agent().run_stream(question) as streamed:
        async for part in streamed.stream_text(delta=True):
            text += part
        usage = streamed.usage
    return {
        "chats": [answer(whole.output, whole.usage), answer(text, usage)],
        "refused": {
            "tools": partial(agent(tools=[weather]).run, question),
            "output_tool": partial(agent(output_type=CITY).run, question),
            "output_schema": partial(agent(output_type=NativeOutput(CITY)).run, question),
        },
    }

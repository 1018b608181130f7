"""openai-agents: an agent's answers, whole and streamed; what it makes of a refusal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # traces go to OpenAI

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from pydantic import BaseModel


class City(BaseModel):
    """An answer that is not plain text."""

    name: str


job = json.load(sys.stdin)
system, question = (message["content"] for message in job["messages"])


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def answer(text: str, run: Any) -> dict[str, Any]:
    """An answer in the form that all drivers print."""
    usage = run.context_wrapper.usage
    return {
        "text": text,
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "cached_tokens": usage.input_tokens_details.cached_tokens,
    }


async def refused(asked: Agent[Any]) -> dict[str, Any]:
    """The exception that a run ends with."""
    try:
        await Runner.run(asked, question)
    except openai.BadRequestError as error:
        return {
            "exception": type(error).__name__,
            "status": error.status_code,
            "param": error.param,
            "message": str(error),
        }
    return {"exception": "none"}


async def main() -> dict[str, Any]:
    """What was seen."""
    client = openai.AsyncOpenAI(base_url=job["base_url"], api_key="any", max_retries=0)
    common: dict[str, Any] = {
        "name": "assistant",
        "instructions": system,
        "model": OpenAIChatCompletionsModel(job["model"], client),  # the default calls /v1/responses
        "model_settings": ModelSettings(temperature=0, max_tokens=job["max_tokens"], include_usage=True),
    }
    agent = Agent(**common)
    whole = await Runner.run(agent, question)
    streamed = Runner.run_streamed(agent, question)
    text = ""
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    return {
        "chats": [answer(whole.final_output, whole), answer(text, streamed)],
        "refused": {
            "tools": await refused(Agent(**common, tools=[function_tool(weather)])),
            "output_type": await refused(Agent(**common, output_type=City)),
        },
    }


print(f"\n{json.dumps(asyncio.run(main()))}")

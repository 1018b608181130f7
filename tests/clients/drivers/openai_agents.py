"""openai-agents: an agent's answers, whole and streamed; what it makes of a refusal."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # traces go to OpenAI

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from pydantic import create_model


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def answer(text: str, run: Any) -> tuple[Any, ...]:
    usage = run.context_wrapper.usage
    return text, usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens


async def drive(job: Any) -> dict[str, Any]:
    client = openai.AsyncOpenAI(base_url=job["base_url"], api_key="any", max_retries=0)
    system, question = (message["content"] for message in job["messages"])

    def agent(**more: Any) -> Agent[Any]:
        return Agent(
            name="assistant",
            instructions=system,
            model=OpenAIChatCompletionsModel(job["model"], client),  # the default calls /v1/responses
            model_settings=ModelSettings(temperature=0, max_tokens=job["max_tokens"], include_usage=True),
            **more,
        )

    whole = await Runner.run(agent(), question)
    streamed = Runner.run_streamed(agent(), question)
    text = ""
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    return {
        "chats": [answer(whole.final_output, whole), answer(text, streamed)],
        "refused": {
            "tools": partial(Runner.run, agent(tools=[function_tool(weather)]), question),
            "output_type": partial(Runner.run, agent(output_type=create_model("City", name=(str, ...))), question),
        },
    }

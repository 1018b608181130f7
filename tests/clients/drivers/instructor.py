"""instructor: it always asks for JSON of a schema, so all it can get is a refusal."""

from __future__ import annotations

from functools import partial
from typing import Any

import instructor
import openai
from pydantic import create_model

CITY = create_model("City", name=(str, ...))


async def drive(job: Any) -> dict[str, Any]:
    client = openai.OpenAI(base_url=job["base_url"], api_key="any", max_retries=0)

    def ask(mode: Any) -> None:
        instructor.from_openai(client, mode=mode).chat.completions.create(
            model=job["model"], messages=job["messages"], response_model=CITY, max_retries=0
        )

    modes = {"tools": instructor.Mode.TOOLS, "json_schema": instructor.Mode.JSON_SCHEMA}
    return {"refused": {name: partial(ask, mode) for name, mode in modes.items()}}

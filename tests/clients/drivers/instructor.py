"""instructor: it always asks for JSON of a schema, so all it can get is a refusal."""

from __future__ import annotations

import json
import sys
from typing import Any

import instructor
import openai
from pydantic import BaseModel


class City(BaseModel):
    """An answer that is not plain text."""

    name: str


job = json.load(sys.stdin)


def refused(mode: Any) -> dict[str, Any]:
    """The exception that a call ends with, and the one that caused it."""
    client = openai.OpenAI(base_url=job["base_url"], api_key="any", max_retries=0)
    try:
        instructor.from_openai(client, mode=mode).chat.completions.create(
            model=job["model"], messages=job["messages"], response_model=City, max_retries=0
        )
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, openai.BadRequestError):
            cause = cause.__cause__
        if cause is None:
            raise
        return {
            "exception": type(error).__name__,
            "status": cause.status_code,
            "param": cause.param,
            "message": str(error),
        }
    return {"exception": "none"}


modes = {"tools": instructor.Mode.TOOLS, "json_schema": instructor.Mode.JSON_SCHEMA}
seen = {"refused": {name: refused(mode) for name, mode in modes.items()}}
print(f"\n{json.dumps(seen)}")

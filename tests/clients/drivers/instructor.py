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
        param = None if cause is None else cause.param
        return {"kind": type(error).__name__, "param": param, "message": str(error)}
    return {"kind": "", "param": None, "message": ""}


seen = {"tools": refused(instructor.Mode.TOOLS), "json_schema": refused(instructor.Mode.JSON_SCHEMA)}
print(f"\n{json.dumps(seen)}")

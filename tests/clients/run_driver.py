"""`python -I run_driver.py DRIVER`, in a client's environment: reads a job, runs the driver, and prints what its client saw.

A driver is a file with `async def drive(job)`, or `def`, which uses its client as its users do. It returns a dict: an answer is
a tuple of its text and its numbers of prompt tokens, generated tokens and cached tokens; under "refused" are functions whose
requests kvpool must refuse. The job and, as the last line, what was seen are JSON. Nothing of ours is imported: the environment
does not have it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any


async def refused(ask: Callable[[], Any]) -> dict[str, Any]:
    """The exception that a request ends with; status and field are those of the first exception that has a status."""
    try:
        asked = ask()
        if inspect.isawaitable(asked):
            await asked
    except Exception as error:
        cause: Any = error
        while not hasattr(cause, "status_code"):
            if (cause := cause.__cause__) is None:
                raise
        param = cause.param if hasattr(cause, "param") else (getattr(cause, "body", None) or {}).get("param")
        return {"exception": type(error).__name__, "status": cause.status_code, "param": param, "message": str(error)}
    return {"exception": "none"}


async def seen_by(driver: Any, job: Any) -> dict[str, Any]:
    seen: dict[str, Any] = await driver.drive(job)
    seen["refused"] = {name: await refused(ask) for name, ask in seen["refused"].items()}
    return seen


def main(path: str) -> None:
    """Run a driver once. One that is synchronous asks for nothing that is refused."""
    spec = importlib.util.spec_from_file_location("driver", path)
    assert spec is not None
    assert spec.loader is not None
    driver = sys.modules["driver"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(driver)
    job = json.load(sys.stdin)
    is_async = inspect.iscoroutinefunction(driver.drive)
    print(f"\n{json.dumps(asyncio.run(seen_by(driver, job)) if is_async else driver.drive(job))}")


main(sys.argv[1])

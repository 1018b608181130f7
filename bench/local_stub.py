"""A manager in the same process, called without gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kvpool.cache_service.servicer import CacheServicer


class LocalContext:
    """Replaces the context of a gRPC call. Benchmarks send nothing that a manager refuses, so a status is an error."""

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        raise RuntimeError(f"the manager answered {self.code}: {details}")

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass


class LocalStub:
    """A manager's servicer with the methods of a stub."""

    def __init__(self, servicer: CacheServicer) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._servicer, name)

        async def call(request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            return await method(request, LocalContext())

        return call

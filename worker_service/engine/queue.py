"""Requests by rank, waiting or running."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Payer, Request


class RequestQueue:
    """Requests in order of rank."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_prompt_tokens = 0
        self.payers: Counter[Payer] = Counter()
        """Number of requests of each."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        index = self._index(request)
        return index < len(self._requests) and self._requests[index] is request

    @property
    def last(self) -> Request:
        """The youngest request of the worst level. The queue must not be empty."""
        return self._requests[-1]

    def add(self, request: Request) -> None:
        """Insert a request at its rank, which must be free."""
        index = self._index(request)
        assert index == len(self._requests) or self._requests[index].rank > request.rank
        self._requests.insert(index, request)
        self.num_prompt_tokens += request.num_prompt_tokens
        self.payers[request.payer] += 1

    def remove(self, request: Request) -> None:
        """Remove a request, which must be in the queue."""
        index = self._index(request)
        assert self._requests[index] is request
        del self._requests[index]
        self.num_prompt_tokens -= request.num_prompt_tokens
        self.payers[request.payer] -= 1
        if not self.payers[request.payer]:
            del self.payers[request.payer]

    def _index(self, request: Request) -> int:
        return bisect_left(self._requests, request.rank, key=lambda other: other.rank)

"""Fair shares of the steps for the tenants of one level: virtual-time fair queueing by computed tokens, equal weights.

Each tenant has an account of the tokens that steps have computed for it; the tenant with the smallest one is served first.
Accounts are charged as tokens are computed, because the length of a text is not known beforehand: VTC (Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024). A tenant that becomes active gets no credit for idle time: its account starts at the
virtual time or above. The virtual time is that of WF2Q+ (Bennett and Zhang, "Hierarchical Packet Fair Queueing Algorithms", 1997):
it advances by work / number of tenants, and is at least the smallest account of an active tenant. VTC has the second part only;
with that, a flood of tenants with one request each would starve the tenants served before.

Laws: of two tenants that are active all the time, one is ahead by at most the work that its sequences in the batch may still do
plus one prompt. A request is served after a bounded amount of others' work, for any number of new tenants.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace, nlargest
from itertools import groupby
from typing import TYPE_CHECKING

from .request import Payer

if TYPE_CHECKING:
    from .request import Request

MAX_IDLE_ACCOUNTS = 4096
"""Accounts kept of idle tenants that are ahead of the virtual time; beyond that, the least ahead are forgotten."""


class _Accounts:
    """The accounts of one level, kept while it has active tenants."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._active: set[str] = set()
        """Tenants with requests that wait or whose prompt is not computed."""
        self._virtual_time = 0.0

    def of(self, tenant: str) -> float:
        """Virtual tokens computed for the tenant."""
        return self._tokens.get(tenant, self._virtual_time)

    def enter(self, tenant: str) -> None:
        """The tenant is active. It gets no credit for the time that it was idle."""
        if tenant not in self._active:
            self._active.add(tenant)
            self._tokens[tenant] = max(self.of(tenant), self._virtual_time)

    def charge(self, computed: Mapping[str, int]) -> None:
        num_tenants = len(self._active.union(computed))
        for tenant, num_tokens in computed.items():
            self._tokens[tenant] = self.of(tenant) + num_tokens
        advanced = self._virtual_time + sum(computed.values()) / num_tenants
        self._virtual_time = max(advanced, min(self._tokens[tenant] for tenant in self._active))

    def settle(self, active: set[str]) -> None:
        """Note that only these tenants are still active. Idle tenants keep their accounts only if those are ahead of the virtual
        time."""
        self._active = active
        idle = {t: tokens for t, tokens in self._tokens.items() if t not in active and tokens > self._virtual_time}
        if len(idle) > MAX_IDLE_ACCOUNTS:
            idle = dict(nlargest(MAX_IDLE_ACCOUNTS, idle.items(), key=lambda item: item[1]))
        self._tokens = {tenant: self._tokens[tenant] for tenant in active} | idle


class Fairness:
    """The accounts of all levels."""

    def __init__(self) -> None:
        self._levels: dict[int, _Accounts] = {}

    def enter(self, payer: Payer) -> None:
        self._levels.setdefault(payer.level, _Accounts()).enter(payer.tenant)

    def charge(self, parts: Iterable[tuple[Request, int]]) -> None:
        if not self._levels:
            return
        computed = tokens_by_payer(parts)
        for level, accounts in self._levels.items():
            tenants = {payer.tenant: count for payer, count in computed.items() if payer.level == level}
            if tenants:
                accounts.charge(tenants)

    def settle(self, active: Iterable[Payer]) -> None:
        """Note that only these payers still have requests that wait or whose prompts are not computed. The accounts of a level
        without any are closed."""
        if not self._levels:
            return
        tenants: dict[int, set[str]] = {}
        for payer in active:
            tenants.setdefault(payer.level, set()).add(payer.tenant)
        self._levels = {level: accounts for level, accounts in self._levels.items() if level in tenants}
        for level, accounts in self._levels.items():
            accounts.settle(tenants[level])

    def in_order(self, requests: Iterable[Request], committed: Mapping[Payer, int]) -> Iterator[Request]:
        """Level by level, the oldest request of the tenant with the smallest account, which counts the requests yielded before as
        computed. `requests`: of payers that have entered, by rank. `committed`: tokens to add to the accounts."""
        for level, members in groupby(requests, key=lambda request: request.rank.level):
            accounts = self._levels[level]
            lanes: dict[str, deque[Request]] = {}
            for request in members:
                lanes.setdefault(request.params.tenant, deque()).append(request)
            heap = [
                (accounts.of(tenant) + committed.get(Payer(level, tenant), 0), lane[0].rank, tenant)
                for tenant, lane in lanes.items()
            ]
            heapify(heap)
            while heap:
                tokens, _, tenant = heap[0]
                lane = lanes[tenant]
                request = lane.popleft()
                if lane:
                    heapreplace(heap, (tokens + request.num_uncomputed_tokens, lane[0].rank, tenant))
                else:
                    heappop(heap)
                yield request


def tokens_by_payer(parts: Iterable[tuple[Request, int]]) -> Counter[Payer]:
    """Tokens of requests, summed per payer."""
    total: Counter[Payer] = Counter()
    for request, num_tokens in parts:
        total[request.payer] += num_tokens
    return total

"""Fair shares of the steps for the tenants of one level: virtual-time fair queueing by computed tokens, equal weights.

Each tenant has an account of the tokens that steps have computed for it; whoever has the smallest one is served first. Accounts
charged by tokens as they are computed, since nobody knows beforehand how long a text gets: VTC (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024). A tenant that begins to ask gets no credit for the time before: its account begins at the
virtual time at least. That is WF2Q+'s (Bennett and Zhang, "Hierarchical Packet Fair Queueing Algorithms", 1997): it advances by
work / number of tenants, and is never behind the smallest account of those that ask. VTC has the second part only, by which a
flood of tenants that each ask once would starve whoever has been served before.

What holds: of two tenants that ask all the time, one is ahead by at most the work that its sequences in the batch may still
do and one prompt. And whoever asks is served after a bounded amount of others' work, however many new tenants come.
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
"""Of tenants that ask for nothing now but have had more than others; beyond that, those who had the least more are forgotten."""


class _Accounts:
    """Of the tenants of one level, as long as somebody is short of something there."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._asking: set[str] = set()
        """Tenants with requests that wait or whose prompt is not computed."""
        self._virtual_time = 0.0

    def of(self, tenant: str) -> float:
        """Virtual tokens computed for the tenant."""
        return self._tokens.get(tenant, self._virtual_time)

    def enter(self, tenant: str) -> None:
        """The tenant asks for something. If it did not before, it gets no credit for that time."""
        if tenant not in self._asking:
            self._asking.add(tenant)
            self._tokens[tenant] = max(self.of(tenant), self._virtual_time)

    def charge(self, computed: Mapping[str, int]) -> None:
        """So many tokens are computed for each tenant."""
        num_tenants = len(self._asking.union(computed))
        for tenant, num_tokens in computed.items():
            self._tokens[tenant] = self.of(tenant) + num_tokens
        advanced = self._virtual_time + sum(computed.values()) / num_tenants
        self._virtual_time = max(advanced, min(self._tokens[tenant] for tenant in self._asking))

    def settle(self, asking: set[str]) -> None:
        """Only these still ask. The others' accounts matter as far as they are ahead."""
        self._asking = asking
        idle = {t: tokens for t, tokens in self._tokens.items() if t not in asking and tokens > self._virtual_time}
        if len(idle) > MAX_IDLE_ACCOUNTS:
            idle = dict(nlargest(MAX_IDLE_ACCOUNTS, idle.items(), key=lambda item: item[1]))
        self._tokens = {tenant: self._tokens[tenant] for tenant in asking} | idle


class Fairness:
    """The accounts of all levels."""

    def __init__(self) -> None:
        self._levels: dict[int, _Accounts] = {}

    def enter(self, payer: Payer) -> None:
        """A request of the payer waits."""
        self._levels.setdefault(payer.level, _Accounts()).enter(payer.tenant)

    def charge(self, parts: Iterable[tuple[Request, int]]) -> None:
        """A step computes so many tokens of these requests."""
        if not self._levels:
            return
        computed = tokens_by_payer(parts)
        for level, accounts in self._levels.items():
            tenants = {payer.tenant: count for payer, count in computed.items() if payer.level == level}
            if tenants:
                accounts.charge(tenants)

    def settle(self, asking: Iterable[Payer]) -> None:
        """Only these still have requests that wait or whose prompts are not computed. Where nobody has, everybody has had what
        they asked for: those accounts are closed."""
        if not self._levels:
            return
        tenants: dict[int, set[str]] = {}
        for payer in asking:
            tenants.setdefault(payer.level, set()).add(payer.tenant)
        self._levels = {level: accounts for level, accounts in self._levels.items() if level in tenants}
        for level, accounts in self._levels.items():
            accounts.settle(tenants[level])

    def in_order(self, requests: Iterable[Request], committed: Mapping[Payer, int]) -> Iterator[Request]:
        """Level by level, the oldest request of the tenant whose account is the smallest, as it will be when what came before is
        computed. `requests`: of payers that have entered, in the order of their ranks; `committed`: tokens to count beside the
        accounts."""
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
    """Tokens of requests, summed up by who pays for them."""
    total: Counter[Payer] = Counter()
    for request, num_tokens in parts:
        total[request.payer] += num_tokens
    return total

"""The limits of the queue: which request a newcomer displaces when it is full, and when a refused caller should retry."""

from __future__ import annotations

from collections import Counter, deque

from ..cache.sequence import SequenceState
from .errors import EngineError, ErrorKind
from .request import Payer, Request
from .scheduler import RequestQueue
from .settings import EngineSettings

RATE_SECONDS = 10.0
"""Window over which tokens per second are measured."""
LEAST_RETRY_SECONDS = 0.1
MOST_RETRY_SECONDS = 60.0
UNKNOWN_RETRY_SECONDS = 1.0
"""Retry time before anything is measured."""
_MEAN_OF_REQUESTS = 32
"""Requests in the moving average of the work of one."""


class TokenRate:
    """Tokens computed per second, over a sliding window."""

    def __init__(self, window_seconds: float = RATE_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._total = 0
        self._marks: deque[tuple[float, int]] = deque()
        """(time, total before it), about twenty per window."""

    def note(self, num_tokens: int, seconds: float, now: float) -> None:
        """A step of `seconds`, which ended now, has computed `num_tokens`."""
        if not self._marks or now - self._marks[-1][0] >= self._window_seconds / 20:
            self._marks.append((now - seconds, self._total))
        self._total += num_tokens
        # The oldest mark stays until the next one covers the whole window.
        while len(self._marks) > 1 and now - self._marks[1][0] >= self._window_seconds:
            self._marks.popleft()

    def tokens_per_second(self, now: float) -> float:
        """The rate over the window; 0 before the first step."""
        if not self._marks or now <= self._marks[0][0]:
            return 0.0
        return (self._total - self._marks[0][1]) / (now - self._marks[0][0])


class Admission:
    """The limits of the queue, and the measured rates from which the retry time of a refused request follows."""

    def __init__(self, settings: EngineSettings) -> None:
        self._max_num_waiting = settings.max_num_waiting
        self._max_num_waiting_tokens = settings.max_num_waiting_tokens
        self.rate = TokenRate()
        self._mean_work = 0.0
        """Tokens computed for one request in all."""
        self._num_finished = 0
        self._next_place_at = 0.0
        """When all requests refused so far will have found room."""

    def on_finished(self, request: Request) -> None:
        work = request.num_prompt_tokens - request.num_cached_tokens + request.num_generated_in_all
        self._num_finished += 1
        self._mean_work += (work - self._mean_work) / min(self._num_finished, _MEAN_OF_REQUESTS)

    def check(self, waiting: RequestQueue, payer: Payer, num_prompt_tokens: int, now: float) -> list[Request]:
        """The requests that a newcomer displaces; none while there is room. Raises EngineError if there is no place for it.

        In a full queue a newcomer displaces the youngest request of the worst level, if that is worse than its own; else the
        youngest of the tenant with the largest share, if that tenant keeps at least the share of the newcomer's. Otherwise one
        tenant's flood would lock out all others. Only requests that hold nothing and have never run are displaced. One prompt of
        any length may always wait.
        """
        num_over = len(waiting) + 1 - self._max_num_waiting
        num_tokens_over = waiting.num_prompt_tokens + num_prompt_tokens - self._max_num_waiting_tokens
        if num_over <= 0 and num_tokens_over <= 0:
            self._next_place_at = now  # refused callers have come back, or found another worker
            return []
        places = _Places(waiting, payer, num_prompt_tokens, in_tokens=num_tokens_over > 0)
        chosen: list[Request] = []
        while num_over > 0 or (num_tokens_over > 0 and len(chosen) < len(waiting)):
            request = places.take()
            if request is None:
                num_requests = max(1, num_over, num_tokens_over * len(waiting) / max(1, waiting.num_prompt_tokens))
                raise self._busy("the queue is full", waiting, num_requests, now)
            chosen.append(request)
            num_over -= 1
            num_tokens_over -= request.num_prompt_tokens
        return chosen

    def displaced(self, waiting: RequestQueue, now: float) -> EngineError:
        return self._busy("another request has taken its place in the full queue", waiting, 1, now)

    def _busy(self, why: str, waiting: RequestQueue, num_requests: float, now: float) -> EngineError:
        retry_seconds = self._retry_seconds(num_requests, now)
        return EngineError(
            ErrorKind.BUSY,
            f"{why}: {len(waiting)} requests with {waiting.num_prompt_tokens} prompt tokens are waiting, the limits are "
            f"{self._max_num_waiting} and {self._max_num_waiting_tokens}; try again in {retry_seconds:.1f} s or on another "
            "worker, or raise this one's limits (--max-num-waiting, --max-num-waiting-tokens)",
            retry_seconds=retry_seconds,
        )

    def _retry_seconds(self, num_requests: float, now: float) -> float:
        """Seconds until `num_requests` will have left the queue, at the mean work of a request and the present rate. Requests
        refused earlier are counted first, so that they do not all come back at the same time."""
        rate = self.rate.tokens_per_second(now)
        if not rate or not self._mean_work:
            return UNKNOWN_RETRY_SECONDS
        self._next_place_at = max(now, self._next_place_at) + num_requests * self._mean_work / rate
        self._next_place_at = min(self._next_place_at, now + MOST_RETRY_SECONDS)
        return max(LEAST_RETRY_SECONDS, self._next_place_at - now)


class _Places:
    """The places in a full queue that a newcomer of `payer` may take."""

    def __init__(self, waiting: RequestQueue, payer: Payer, num_prompt_tokens: int, *, in_tokens: bool) -> None:
        """`in_tokens`: a tenant's share of the queue is measured in prompt tokens, not in requests."""
        self._tenant = payer.tenant
        self._in_tokens = in_tokens
        self._worse: list[Request] = []
        """Requests of worse levels; the youngest of the worst one is the last."""
        self._equal: dict[str, list[Request]] = {}
        """Requests of other tenants of the newcomer's level; the youngest is the last."""
        self._shares = Counter({payer.tenant: num_prompt_tokens if in_tokens else 1})
        """Each tenant's share of the queue at that level, the newcomer included."""
        for request in waiting:
            tenant = request.params.tenant
            if request.rank.level > payer.level:
                if _may_go(request):
                    self._worse.append(request)
            elif request.rank.level == payer.level:
                self._shares[tenant] += self._size(request)
                if _may_go(request) and tenant != payer.tenant:
                    self._equal.setdefault(tenant, []).append(request)

    def take(self) -> Request | None:
        """The request to displace next; None if there is none."""
        if self._worse:
            return self._worse.pop()
        if not self._equal:
            return None
        tenant = max(self._equal, key=lambda tenant: self._shares[tenant])
        request = self._equal[tenant].pop()
        self._shares[tenant] -= self._size(request)
        if not self._equal[tenant]:
            del self._equal[tenant]
        return request if self._shares[tenant] >= self._shares[self._tenant] else None

    def _size(self, request: Request) -> int:
        return request.num_prompt_tokens if self._in_tokens else 1


def _may_go(request: Request) -> bool:
    """Whether the request holds nothing and has never run."""
    sequence = request.sequence
    is_queued = sequence.state in (SequenceState.WAITING, SequenceState.PARKED)
    return is_queued and not sequence.maybe_granted and not request.has_begun

"""Turns the results of a step into what the cache side and the requests take."""

from __future__ import annotations

from ..cache.engine_cache import Computed, EngineCache
from ..step import BadLogits, PartResult, SampledToken
from .errors import EngineError, ErrorKind, invalid
from .request import Request
from .scheduler import Scheduled, Scheduler


def computed(scheduled: Scheduled, result: PartResult) -> Computed:
    """What `EngineCache.end_step` gets for one part."""
    sequence = scheduled.sequence
    if result.bad_logits is not None:
        # KV that led to such logits must not be served to other requests.
        return Computed(sequence, sequence.num_computed_tokens, None)
    # Forks are made without the token, which is added then.
    token_id = None if result.token is None or result.forks else result.token.token_id
    return Computed(sequence, sequence.num_computed_tokens + scheduled.num_tokens, token_id)


def num_added_later(result: PartResult) -> int:
    """Number of sampled tokens that `computed` leaves out: a fork is made before its first token is appended."""
    if result.candidates is not None:
        return 1
    return len(result.forks) + 1 if result.forks else 0


def next_tokens(
    scheduler: Scheduler, cache: EngineCache, request: Request, result: PartResult
) -> list[tuple[Request, SampledToken]]:
    """The next token of a request, and the first ones of its further answers, which begin now. All are in their sequences."""
    assert result.token is not None
    forked: list[tuple[Request, SampledToken]] = []
    for token in result.forks:
        fork = request.fork(cache, may_share=scheduler.has_place_for(request))
        scheduler.add_fork(fork)
        forked.append((fork.request, token))
    own = (request, result.token)
    for answer, token in [own, *forked] if forked else ():
        cache.add_token(answer.sequence, token.token_id)
    return [own, *forked]


def error_of(bad: BadLogits) -> EngineError:
    """Why a request cannot continue. Neither kind is retried on another worker, where the result would be the same."""
    what = f"no token can be chosen for position {bad.position}: the largest logit is {bad.largest:g}"
    if not bad.is_adjusted:
        return EngineError(
            ErrorKind.INTERNAL,
            f"{what} where a finite number was needed. The model does this for these tokens on every worker: change the prompt, "
            "or check for weights that are not finite or overflow in the worker's dtype (--dtype)",
        )
    if bad.largest < 0:
        return invalid(
            "stop.min_tokens",
            f"{what}; ids that end the text are excluded before min_tokens, and the model excludes all others: "
            "lower min_tokens, or give fewer stop_token_ids",
        )
    return invalid(
        "sampling.repetition_penalty",
        f"{what}, the model's own is finite: bias and penalties overflow float32; use a penalty nearer to 1",
    )

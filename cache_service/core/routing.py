"""Route: which workers would have the least to compute for a prompt. Looks, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from .hashing import HashFunction
from .messages import TOKEN_BYTES, Root, WorkerLoad
from .prefix_tree import Holder, Node, PrefixTree
from .session import Session

SEQUENCE_COST_TOKENS = 16
"""What one more sequence on a worker costs a newcomer, in tokens of prefill. It only has to spread equal prompts over idle
workers before a short prefix pulls them all to one."""


class RoutedWorker(NamedTuple):
    """A worker that can serve the prompt, and how much of it it has."""

    session: Session
    num_cached_tokens: int
    num_in_flight_tokens: int
    """Prefix that it holds or is computing; at least num_cached_tokens."""
    load: WorkerLoad


def _cached(path: list[Node]) -> dict[Holder, int]:
    """Per pool that holds the first node, how many leading nodes of the path it holds.

    A common prefix is held by all workers, node after node. So what is asked of a node is whether any pool ends here, which takes
    one comparison of signatures where the same pools hold it as the node before.
    """
    cached: dict[Holder, int] = {}
    if not path:
        return cached
    going_on, signature = set(path[0].pools()), path[0].holders_signature()
    for index, node in enumerate(path):
        here = node.holders_signature()
        if here == signature:
            continue
        signature = here
        holding = {pool for pool in going_on if node.copy_in(pool)}
        cached.update(dict.fromkeys(going_on - holding, index))
        going_on = holding
        if not going_on:
            return cached
    cached.update(dict.fromkeys(going_on, len(path)))
    return cached


def _in_flight(path: list[Node]) -> dict[Holder, int]:
    """Per pool that holds the first node or is computing it, how many leading nodes of the path it holds or is computing.

    As in `_cached`, with the sequences of a pool that are computing a node taken together: many that share one prompt cost no more
    than one.
    """
    reached: dict[Holder, int] = {}
    if not path:
        return reached
    going_on = {*path[0].pools(), *path[0].leading_pools()}
    holders, leaders = path[0].holders_signature(), path[0].leaders_signature()
    for index, node in enumerate(path):
        holders_here, leaders_here = node.holders_signature(), node.leaders_signature()
        if holders_here == holders and leaders_here == leaders:
            continue
        holders, leaders = holders_here, leaders_here
        leading = node.leading_pools()
        here = {pool for pool in going_on if node.copy_in(pool) or pool in leading}
        reached.update(dict.fromkeys(going_on - here, index))
        going_on = here
        if not going_on:
            return reached
    reached.update(dict.fromkeys(going_on, len(path)))
    return reached


_ORDER = itemgetter(0, 1)
"""Of (cost, tie, session): sessions have none."""


class _Prompt(NamedTuple):
    """What a prompt means to pools of one block size."""

    cached: dict[Holder, int]
    in_flight: dict[Holder, int]
    first_block: bytes


def _look_up(tree: PrefixTree, root: Root, tokens: bytes, block_size: int) -> _Prompt:
    node = tree.find_root(root, block_size)
    max_blocks = (len(tokens) // TOKEN_BYTES - 1) // block_size
    path = [] if node is None else tree.match(node, tokens, block_size, max_blocks)
    return _Prompt(_cached(path), _in_flight(path), b"\0" + tokens[: block_size * TOKEN_BYTES])


def route(
    tree: PrefixTree,
    sessions: Iterable[Session],
    root: Root,
    tokens: bytes,
    hash_function: HashFunction,
    max_workers: int = 0,
) -> list[RoutedWorker]:
    """The sessions, best first: least expected work (tokens to compute + work queued), cold ties by hash of the first block. At
    most `max_workers`, if that is not 0.

    The hash is combined with the worker's id (rendezvous hashing), so that equal cold prompts meet on one worker and different
    ones spread.
    """
    num_tokens = len(tokens) // TOKEN_BYTES
    prompts: dict[int, _Prompt] = {}
    ranked: list[tuple[int, int, Session]] = []
    for session in sessions:
        pool, load = session.pool, session.load
        prompt = prompts.get(pool.block_size)
        if prompt is None:
            prompt = prompts[pool.block_size] = _look_up(tree, root, tokens, pool.block_size)
        num_computed = prompt.in_flight.get(pool, 0) * pool.block_size
        num_running = len(session.sequences)
        if load.num_running > num_running:
            num_running = load.num_running
        cost = num_tokens - num_computed + load.num_uncomputed_tokens
        cost += SEQUENCE_COST_TOKENS * (num_running + load.num_waiting)
        ranked.append((cost, hash_function(session.name + prompt.first_block), session))
    ranked.sort(key=_ORDER)
    routed = []
    for _, _, session in ranked[:max_workers] if max_workers else ranked:
        prompt, block_size = prompts[session.pool.block_size], session.pool.block_size
        num_cached = prompt.cached.get(session.pool, 0) * block_size
        num_in_flight = prompt.in_flight.get(session.pool, 0) * block_size
        routed.append(RoutedWorker(session, num_cached, num_in_flight, session.load))
    return routed

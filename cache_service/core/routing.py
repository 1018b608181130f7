"""Route: which workers have the least to compute for a prompt. Changes nothing."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as List
from operator import itemgetter
from typing import NamedTuple

from .copies import Holder
from .hashing import HashFunction
from .hits import cached_along, reach
from .messages import TOKEN_BYTES, Root, WorkerLoad
from .prefix_tree import Node, PrefixTree, RootNode
from .session import Session

SEQUENCE_COST_TOKENS = 16
"""Cost of a sequence on a worker for a new one, in tokens of prefill: large enough to spread equal prompts over idle workers before
a short prefix draws them all to one."""


class RoutedWorker(NamedTuple):
    """A worker that can serve the prompt, and how much of it it has."""

    session: Session
    num_cached_tokens: int
    num_in_flight_tokens: int
    """Prefix that it holds or is computing; at least num_cached_tokens."""
    load: WorkerLoad
    encoder_cached: bool = False
    """It holds the KV of the encoder's input."""


def _holders_or_leaders(node: Node) -> set[Holder]:
    return {*node.complete_holders(), *node.leading_holders()}


def _signature(node: Node) -> tuple[int, int]:
    return node.copies_signature(), node.leaders_signature()


def _deepest_led(path: list[Node]) -> dict[Holder, int]:
    """Where the last node is that a holder's sequences are computing: windows are named there, not at every node before it."""
    found: dict[Holder, int] = {}
    for index in range(len(path) - 1, -1, -1):
        for holder in path[index].leading_holders():
            found.setdefault(holder, index + 1)
    return found


_ORDER = itemgetter(0, 1)
"""Of (cost, tie, session): sessions have none."""


class _Prompt(NamedTuple):
    """What a prompt means to workers of one block size."""

    cached: dict[Holder, int]
    in_flight: dict[Holder, int]
    first_block: bytes
    """And the digest of what the tokens refer to."""
    units: Collection[Holder]
    """Those that hold the KV of the encoder's input."""
    units_in_flight: Collection[Holder]
    """Those that have a sequence which is about to run the encoder."""


def _look_up(tree: PrefixTree, root: Root, tokens: bytes, block_size: int, sessions: List[Session]) -> _Prompt:
    node = tree.find_root(root, block_size)
    max_blocks = (len(tokens) // TOKEN_BYTES - 1) // block_size
    path = [] if node is None else tree.match(node, tokens, block_size, max_blocks)
    windowed = [session for session in sessions if session.holder.window_slots]
    cached = cached_along(path, [session.holder for session in windowed], max_blocks)
    in_flight = reach(path, _holders_or_leaders, _signature)
    if windowed:
        led = _deepest_led(path)
        for session in windowed:
            holder = session.holder
            in_flight[holder] = max(cached.get(holder, 0), session.on_grid(led.get(holder, 0)))
    units = node.units if isinstance(node, RootNode) else ()
    leading = () if node is None else node.leading_holders()
    return _Prompt(cached, in_flight, b"\0" + root.input_digest + tokens[: block_size * TOKEN_BYTES], units, leading)


def route(
    tree: PrefixTree,
    sessions: List[Session],
    root: Root,
    tokens: bytes,
    hash_function: HashFunction,
    max_workers: int = 0,
    num_encoder_tokens: int = 0,
) -> list[RoutedWorker]:
    """The sessions, best first: least expected work (tokens to compute, those of the encoder's input included, + work queued), cold
    ties by hash of the first block. At most `max_workers`, if that is not 0.

    The hash is combined with the worker's id (rendezvous hashing), so that equal cold prompts meet on one worker and different
    ones spread.
    """
    num_tokens = len(tokens) // TOKEN_BYTES
    prompts: dict[int, _Prompt] = {}
    ranked: list[tuple[int, int, Session]] = []
    for session in sessions:
        block_size, load = session.block_size, session.load
        prompt = prompts.get(block_size)
        if prompt is None:
            prompt = prompts[block_size] = _look_up(tree, root, tokens, block_size, sessions)
        num_computed = prompt.in_flight.get(session.holder, 0) * block_size
        num_running = len(session.sequences)
        if load.num_running > num_running:
            num_running = load.num_running
        cost = num_tokens - num_computed + load.num_uncomputed_tokens
        if session.holder not in prompt.units and session.holder not in prompt.units_in_flight:
            cost += num_encoder_tokens
        cost += SEQUENCE_COST_TOKENS * (num_running + load.num_waiting)
        ranked.append((cost, hash_function(session.name + prompt.first_block), session))
    ranked.sort(key=_ORDER)
    routed = []
    for _, _, session in ranked[:max_workers] if max_workers else ranked:
        prompt, block_size = prompts[session.block_size], session.block_size
        num_cached = prompt.cached.get(session.holder, 0) * block_size
        num_in_flight = prompt.in_flight.get(session.holder, 0) * block_size
        has_unit = session.holder in prompt.units
        routed.append(RoutedWorker(session, num_cached, num_in_flight, session.load, has_unit))
    return routed

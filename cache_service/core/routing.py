"""Route: which workers have the least to compute for a prompt. Changes nothing.

The cost of a prompt on a worker is its load (candidates.py) and what the worker would have to compute: the tokens that it neither
holds nor computes already, and the encoder's input, unless it has that. With many workers only those are looked at that may be
among the best: the ones that hold some of the prompt, and the least loaded.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection
from collections.abc import Sequence as List
from typing import Final, NamedTuple

from .candidates import ModelCandidates, Place
from .copies import Holder
from .hashing import HashFunction
from .hits import cached_along, reach
from .messages import TOKEN_BYTES, Root, WorkerLoad
from .prefix_tree import Node, PrefixTree
from .session import Session

FEW: Final = 64
"""So many workers are looked at one by one."""
NEIGHBOURS: Final = 32
"""Workers of one load that compete for a prompt, those next to it on the ring. Fewer keep a prompt on the same workers; more
spread the load evenly."""


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
    """Return how many leading nodes of the path each holder will have computed: up to the last one that its sequences lead.
    Boundaries are led, not every node before them."""
    found: dict[Holder, int] = {}
    for index in range(len(path) - 1, -1, -1):
        for holder in path[index].leading_holders():
            found.setdefault(holder, index + 1)
    return found


def _on_path(path: list[Node]) -> set[Holder]:
    """Return the holders that have copies of nodes on the path, or compute some."""
    found: set[Holder] = set()
    before: tuple[int, int] | None = None
    for node in path:
        signature = _signature(node)
        if signature != before:
            found.update(node.holders(), node.leading_holders())
            before = signature
    return found


class _Prompt(NamedTuple):
    """What a prompt means to workers of one block size."""

    cached: dict[Holder, int]
    in_flight: dict[Holder, int]
    with_input: Collection[Holder]
    """Those that hold the KV of the encoder's input."""
    input_in_flight: Collection[Holder]
    """Those that have a sequence which is about to run the encoder."""


def _look_up(
    tree: PrefixTree, root: Root, tokens: bytes, block_size: int, by_holder: dict[Holder, Session], partly: bool
) -> _Prompt:
    """`partly`: whether any of the workers has dependent groups."""
    node = tree.find_root(root, block_size)
    max_blocks = (len(tokens) // TOKEN_BYTES - 1) // block_size
    path = [] if node is None else tree.match(node, tokens, block_size, max_blocks)
    dependent = [by_holder[one] for one in _on_path(path) if one.dependent_slots and one in by_holder] if partly else []
    cached = cached_along(path, dependent, max_blocks)
    in_flight = reach(path, _holders_or_leaders, _signature)
    if dependent:
        led = _deepest_led(path)
        for session in dependent:
            holder = session.holder
            in_flight[holder] = max(cached.get(holder, 0), session.on_grid(led.get(holder, 0)))
    if node is None:
        return _Prompt(cached, in_flight, (), ())
    return _Prompt(cached, in_flight, node.input_blocks, node.leading_holders())


class _Ranking:
    """The best workers found so far, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._best: list[tuple[int, int, int, Session]] = []
        """Cost, tie, number, session."""

    def add(self, cost: int, tie: int, session: Session) -> None:
        """One more."""
        insort(self._best, (cost, tie, session.number, session))
        if len(self._best) > self._most:
            self._best.pop()

    def is_settled(self, least: int) -> bool:
        """Whether workers that cost at least `least` are no better than those found."""
        return len(self._best) == self._most and self._best[-1][0] <= least

    def sessions(self) -> list[Session]:
        """Best first."""
        return [session for _, _, _, session in self._best]


class _Costs:
    """The costs of one prompt on the workers of one model."""

    def __init__(
        self,
        tree: PrefixTree,
        model: ModelCandidates,
        root: Root,
        tokens: bytes,
        hash_function: HashFunction,
        num_encoder_tokens: int,
        num_needed_tokens: int,
    ) -> None:
        self.model = model
        self.num_tokens = len(tokens) // TOKEN_BYTES
        self.num_encoder_tokens = num_encoder_tokens
        self.num_needed_tokens = num_needed_tokens
        self.all_fit = model.all_take(self.num_needed_tokens, num_encoder_tokens)
        self._hash_function = hash_function
        self._first_blocks: dict[int, bytes] = {}
        """And the digest of what the tokens refer to; by block size."""
        self.prompts: dict[int, _Prompt] = {}
        """What the prompt means to the workers of each block size."""
        for size in model.block_sizes:
            self._first_blocks[size] = b"\0" + root.input_digest + tokens[: size * TOKEN_BYTES]
            self.prompts[size] = _look_up(tree, root, tokens, size, model.by_holder, model.num_dependent > 0)

    def fits(self, session: Session) -> bool:
        """Whether the worker has room for the text."""
        has_room = self.num_needed_tokens <= session.max_model_len
        return self.all_fit or (has_room and self.num_encoder_tokens <= session.longest_input)

    def cost(self, session: Session, load: int) -> int:
        """Tokens to compute before and for the prompt, with this load."""
        prompt = self.prompts[session.block_size]
        cost = load + self.num_tokens - prompt.in_flight.get(session.holder, 0) * session.block_size
        has_input = session.holder in prompt.with_input or session.holder in prompt.input_in_flight
        return cost if has_input else cost + self.num_encoder_tokens

    def tie(self, session: Session) -> int:
        """Decides between equal costs: a hash of the first block and the worker's name (rendezvous hashing), so that equal cold
        prompts meet on one worker and different ones spread."""
        return self._hash_function(session.name + self._first_blocks[session.block_size])

    def point(self) -> int:
        """Return the prompt's position on the rings: a hash that compares with those of the workers' names."""
        return self._hash_function(self._first_blocks[max(self._first_blocks)])

    def savings(self) -> dict[Session, int]:
        """What workers have of the prompt, in tokens; of those that have any of it."""
        found: dict[Session, int] = {}
        by_holder = self.model.by_holder
        for size, prompt in self.prompts.items():
            for holder, num_blocks in prompt.in_flight.items():
                session = by_holder.get(holder)
                if num_blocks and session is not None and session.block_size == size and self.fits(session):
                    found[session] = num_blocks * size
            if self.num_encoder_tokens:
                for holder in {*prompt.with_input, *prompt.input_in_flight}:
                    session = by_holder.get(holder)
                    if session is not None and session.block_size == size and self.fits(session):
                        found[session] = found.get(session, 0) + self.num_encoder_tokens
        return found


def route(
    tree: PrefixTree,
    model: ModelCandidates,
    root: Root,
    tokens: bytes,
    hash_function: HashFunction,
    max_workers: int = 0,
    num_encoder_tokens: int = 0,
    num_needed_tokens: int = 0,
) -> list[RoutedWorker]:
    """The workers of a model, best first: least cost, ties by a hash of the first block. At most `max_workers`, if it is not 0.
    Those that have no room for a text of `num_needed_tokens`, or for the encoder's input, are left out."""
    costs = _Costs(tree, model, root, tokens, hash_function, num_encoder_tokens, num_needed_tokens)
    if len(model) <= FEW or not 0 < max_workers < len(model):
        best = _ranked(costs, max_workers)
    else:
        best = _best(costs, max_workers).sessions()
    routed = []
    for session in best:
        size, holder = session.block_size, session.holder
        prompt = costs.prompts[size]
        num_cached, num_in_flight = prompt.cached.get(holder, 0) * size, prompt.in_flight.get(holder, 0) * size
        routed.append(RoutedWorker(session, num_cached, num_in_flight, session.load, holder in prompt.with_input))
    return routed


def _ranked(costs: _Costs, max_workers: int) -> list[Session]:
    """All workers, or the first ones of all."""
    loads = [(one, load) for one, load in costs.model.loads.items() if costs.all_fit or costs.fits(one)]
    by_cost: list[tuple[int, int, Session]]
    if len(costs.prompts) == 1 and not costs.num_encoder_tokens:  # nearly always: as `cost`, without the call
        ((size, prompt),) = costs.prompts.items()
        num_tokens, in_flight = costs.num_tokens, prompt.in_flight
        by_cost = [(load + num_tokens - in_flight.get(one.holder, 0) * size, one.number, one) for one, load in loads]
    else:
        by_cost = [(costs.cost(one, load), one.number, one) for one, load in loads]
    if 0 < max_workers < len(by_cost):
        # Ties are looked at only where they decide.
        by_cost.sort()
        most = by_cost[max_workers - 1][0]
        by_cost = [one for one in by_cost if one[0] <= most]
    ranked = [(cost, costs.tie(session), number, session) for cost, number, session in by_cost]
    ranked.sort()
    return [session for _, _, _, session in ranked[: max_workers or None]]


def _best(costs: _Costs, most: int) -> _Ranking:
    """Return the best of many workers without looking at each: the same as with all, up to ties."""
    ranking = _Ranking(most)
    savings = costs.savings()
    largest = 0
    if len(savings) <= FEW:
        for session, saved in savings.items():
            load = costs.model.loads[session]
            ranking.add(load + costs.num_tokens + costs.num_encoder_tokens - saved, costs.tie(session), session)
    else:
        largest = max(savings.values())
    # The others save nothing or, if there are many that do, at most the largest saving.
    least_work = costs.num_tokens + costs.num_encoder_tokens - largest
    point = costs.point()
    for load, ring in costs.model.rings():
        if ranking.is_settled(load + least_work):
            break
        for session in _from(ring, point, costs, most):
            if ranking.is_settled(load + least_work):
                break
            if largest or session not in savings:
                ranking.add(costs.cost(session, load), costs.tie(session), session)
    return ranking


def _from(ring: list[Place], point: int, costs: _Costs, most: int) -> List[Session]:
    """The sessions of a ring: the neighbours of a point in the order of their ties, then the others as they follow."""
    begin = bisect_left(ring, point, key=_name_hash)
    around = [place.session for place in ring[begin:] + ring[:begin] if costs.all_fit or costs.fits(place.session)]
    near = max(NEIGHBOURS, most)
    return [*sorted(around[:near], key=costs.tie), *around[near:]]


def _name_hash(place: Place) -> int:
    return place.name_hash

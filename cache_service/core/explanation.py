"""Explain: how much of a prompt each worker would serve from its cache, and why no more. Changes nothing, not even the eviction
order.

Of the blocks of a prompt of n tokens, a worker serves the first h. The first line that holds says why it does not serve block h:

    h = ⌊(n−1)/B⌋, B does not divide n    partial tail: the rest does not fill a block (with a state, not a part of the grid)
    h = ⌊(n−1)/B⌋, B divides n            last token: it is always computed, and with it its block, cached or not
    a sequence here computes it           being computed: Allocate would let the prompt wait for it
    its groups that keep all have it      window not kept: no window ends after it, or not all of one is left;
                                          snapshot not kept: no snapshot of the state is left there
    its name is remembered                evicted, probably
    another worker has it                 on another worker
    a sequence elsewhere computes it      being computed, there
    another root has it                   other root
                                          never seen
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from .allocation import longest_run
from .closest_prompt import Bounds, ClosestPath, find_closest
from .copies import Holder
from .evictions import Evicted, EvictionMemory
from .hashing import HashFunction, block_hash, root_bytes
from .hits import cached_along, longest_hit, reach
from .messages import TOKEN_BYTES, BlockMissCause, Root, Wait
from .other_roots import OtherRoot, OtherRoots
from .prefix_tree import Leader, Node, PrefixTree
from .session import Session

MAX_WORKERS = 64
"""Explained in one answer, those that serve most of the prompt."""

MAX_LEADERS = 1024
"""Sequences looked at among those that compute one block."""


MAX_NAMES = 8
"""Looked for among the evictions, for each block size: the workers that serve most of the prompt come first."""


class BlockMiss(NamedTuple):
    """The first token that a worker would not serve, and why."""

    position: int
    cause: BlockMissCause
    evicted: Evicted | None = None
    """The eviction if the cause is EVICTED. Its key is None if the sequence had another salt: its identity is nobody else's
    business."""
    leader: Wait | None = None
    """The sequence to wait for, and how far, if the cause is BEING_COMPUTED."""
    other_root: OtherRoot | None = None
    """The other root under which the tokens are cached, if the cause is OTHER_ROOT."""
    other_worker: Session | None = None
    """The worker that has or computes the block: always if the cause is ON_ANOTHER_WORKER or OTHER_ROOT, if there is one if it is
    EVICTED or BEING_COMPUTED."""
    num_passed_tokens: int = 0
    """Leading tokens that the whole groups hold, if the cause is WINDOW_NOT_KEPT or SNAPSHOT_NOT_KEPT; without whole groups,
    tokens up to the last block held."""


class SessionExplanation(NamedTuple):
    """One worker's part in an explanation."""

    session: Session
    num_cached_tokens: int
    """What Allocate would serve now, if it need not wait."""
    miss: BlockMiss
    encoder_cached: bool = False
    """It holds the KV of the encoder's input."""


class PromptExplanation(NamedTuple):
    """The answer of Explain."""

    workers: list[SessionExplanation]
    """Those that serve most tokens first; at most MAX_WORKERS."""
    num_workers: int
    """All that were asked for."""
    closest: ClosestPath | None


class Search(NamedTuple):
    """What Explain looks at."""

    tree: PrefixTree
    hash_function: HashFunction
    holders: Mapping[Holder, Session]
    """Sessions that can serve hits now."""
    evictions: EvictionMemory | None
    across_salts: bool
    """Whether it may say what is cached under other salts."""
    bounds: Bounds
    """Limits of the search for the closest prompt."""


class _Prompt:
    """A prompt as workers of one block size see it."""

    def __init__(self, search: Search, root: Root, tokens: bytes, block_size: int) -> None:
        self.root = root
        self.tokens = tokens
        self.block_size = block_size
        self._search = search
        num_tokens = len(tokens) // TOKEN_BYTES
        self.is_whole = num_tokens % block_size == 0
        self.max_hits = (num_tokens - 1) // block_size
        self.root_node = search.tree.find_root(root, block_size)
        node = self.root_node
        self.path = [] if node is None else search.tree.match(node, tokens, block_size, num_tokens // block_size)
        """Nodes of its full blocks, as far as there are any; not all of them are cached."""
        dependent = [session for session in search.holders.values() if session.dependents]
        cached = cached_along(self.path, dependent, self.max_hits)
        self.cached = {holder: count for holder, count in cached.items() if holder in search.holders}
        """Leading nodes that a holder has, by holder; without windows it may be one more than is served."""
        self.fullest = max(self.cached, key=self.cached.__getitem__, default=None)
        self._passed = reach(self.path, Node.complete_holders, Node.copies_signature) if dependent else {}
        self._leaders: dict[int, dict[Holder, list[Leader]]] = {}
        self._evictions: dict[int, dict[int, Evicted]] = {}

    def num_hits(self, session: Session) -> int:
        """Blocks that Allocate would serve on this worker."""
        return min(self.max_hits, self.cached.get(session.holder, 0))

    def num_passed(self, holder: Holder) -> int:
        """Leading nodes that a holder's whole groups have. Without such groups: up to the last node that it has."""
        if holder.whole_slots:
            return self._passed.get(holder, 0)
        held = (index for index in range(len(self.path) - 1, -1, -1) if self.path[index].blocks_in(holder))
        return next(held, -1) + 1

    def lacking(self, session: Session, num_passed: int) -> BlockMissCause:
        """What dependent groups lack for a hit of so many nodes that the whole groups have."""
        causes = [cause for cause in BlockMissCause if any(group.miss is cause for group in session.dependents)]
        for cause in causes[:0:-1]:
            others = [group for group in session.dependents if group.miss is not cause]
            num = longest_hit(self.path, others, min(self.max_hits, num_passed))
            if session.on_grid(num) > self.num_hits(session):
                return cause
        return causes[0]

    def evictions(self, index: int) -> Mapping[int, Evicted]:
        """The latest evictions of a block after `index` blocks that are cached, by the first signature of the holder. Nothing is
        found any more after MAX_NAMES blocks: looking for one may take a tenth of a millisecond."""
        found = self._evictions.get(index)
        if found is None:
            memory, found = self._search.evictions, {}
            if memory is not None and len(self._evictions) < MAX_NAMES:
                found = memory.find(self._name_of(index))
            self._evictions[index] = found
        return found

    def _name_of(self, index: int) -> int:
        """The block hash of a block, after `index` blocks that are cached."""
        parent = self.path[index - 1] if index else self.root_node
        hash_function, step = self._search.hash_function, self.block_size * TOKEN_BYTES
        parent_hash = None if parent is None else parent.block_hash
        if parent_hash is None:
            parent_hash = hash_function(root_bytes(self.root, self.block_size))
        return block_hash(hash_function, parent_hash, self.tokens[index * step : (index + 1) * step])

    def in_flight(self, index: int, holder: Holder) -> Wait | None:
        """The holder's sequence for which Allocate would let the prompt wait after `index` hits."""
        end = min(self.max_hits, len(self.path))
        if holder.dependent_slots:  # as in Allocate, the deepest node that is computed
            for last in range(end - 1, index - 1, -1):
                for leader in self.leaders(last).get(holder, ()):
                    session = self._search.holders[holder]
                    boundary = session.on_grid(last + 1)
                    is_past = boundary <= session.sequences[leader.key.sequence_id, leader.key.attempt].num_sealed
                    return None if is_past or boundary <= index else Wait(leader.key, boundary * self.block_size)
            return None
        leaders = self.leaders(index).get(holder)
        return None if leaders is None else longest_run(leaders, self.path, index, end, self.block_size)

    def leaders(self, index: int) -> Mapping[Holder, Sequence[Leader]]:
        """Sequences that compute a block, by holder, oldest first."""
        found = self._leaders.get(index)
        if found is None:
            found = self._leaders[index] = {}
            if index < min(self.max_hits, len(self.path)):
                for leader in islice(self.path[index].iter_leaders(), MAX_LEADERS):
                    if not leader.fenced and leader.holder in self._search.holders:
                        found.setdefault(leader.holder, []).append(leader)
        return found


def explain(search: Search, sessions: Sequence[Session], root: Root, tokens: bytes) -> PromptExplanation:
    """Explain a prompt of at least one token to these sessions, which serve the root's model.

    The walk along the prompt grows with its length, as Route's does; all else is bounded by constants.
    """
    prompts: dict[int, _Prompt] = {}
    for session in sessions:
        block_size = session.block_size
        if block_size not in prompts:
            prompts[block_size] = _Prompt(search, root, tokens, block_size)
    served = [(prompts[session.block_size], session) for session in sessions]
    served.sort(key=lambda pair: (-pair[0].num_hits(pair[1]) * pair[0].block_size, pair[1].worker_id))
    elsewhere = OtherRoots(search.tree, search.holders, root, tokens, across_salts=search.across_salts)
    workers = [
        SessionExplanation(
            session,
            prompt.num_hits(session) * prompt.block_size,
            _miss(search, prompt, session, elsewhere),
            prompt.root_node is not None and session.holder in prompt.root_node.input_blocks,
        )
        for prompt, session in served[:MAX_WORKERS]
    ]
    asked_for = {session.holder for session in sessions}
    found = [
        find_closest(prompt.root_node, prompt.path, prompt.cached, asked_for, tokens, prompt.block_size, search.bounds)
        for prompt in prompts.values()
        if prompt.root_node is not None
    ]
    closest = max((one for one in found if one is not None), key=ClosestPath.rank, default=None)
    return PromptExplanation(workers, len(sessions), closest)


def _miss(search: Search, prompt: _Prompt, session: Session, elsewhere: OtherRoots) -> BlockMiss:
    """Why the block after the served ones is not served; the cases as in the table above."""
    index = prompt.num_hits(session)
    position = index * prompt.block_size
    if index == session.on_grid(prompt.max_hits):
        is_the_last_tokens = prompt.is_whole and session.on_grid(prompt.max_hits + 1) > index
        return BlockMiss(position, BlockMissCause.LAST_TOKEN if is_the_last_tokens else BlockMissCause.PARTIAL_TAIL)
    leader = prompt.in_flight(index, session.holder)
    if leader is not None:
        return BlockMiss(position, BlockMissCause.BEING_COMPUTED, leader=leader)
    num_passed = prompt.num_passed(session.holder) if session.dependents else 0
    if session.on_grid(num_passed) > index:
        return BlockMiss(
            position, prompt.lacking(session, num_passed), num_passed_tokens=num_passed * prompt.block_size
        )
    fullest = prompt.fullest
    other = search.holders[fullest] if fullest is not None and prompt.cached[fullest] > index else None
    evicted = prompt.evictions(index).get(session.holder.signatures[0])
    if evicted is not None:
        if evicted.salt != prompt.root.tenant_salt and not search.across_salts:
            evicted = evicted._replace(key=None)
        return BlockMiss(position, BlockMissCause.EVICTED, evicted=evicted, other_worker=other)
    if other is not None:
        return BlockMiss(position, BlockMissCause.ON_ANOTHER_WORKER, other_worker=other)
    for holder in prompt.leaders(index):
        leader = prompt.in_flight(index, holder)
        if leader is not None:
            return BlockMiss(
                position, BlockMissCause.BEING_COMPUTED, leader=leader, other_worker=search.holders[holder]
            )
    found = elsewhere.find(position, prompt.block_size)
    if found is not None:
        return BlockMiss(position, BlockMissCause.OTHER_ROOT, other_root=found, other_worker=found.session)
    return BlockMiss(position, BlockMissCause.NEVER_SEEN)

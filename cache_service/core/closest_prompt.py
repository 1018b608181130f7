"""The cached prompt that comes closest to a prompt: where the two part, and what the cache would serve if they did not.

Under one root only. The search looks at the children of the last cached node of the prompt, a bounded number of them, and follows
the rest of the prompt below those that agree longest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from .copies import Holder
from .messages import TOKEN_BYTES
from .prefix_tree import Node

MAX_CHILDREN = 512
MAX_NODES = 1024


class Bounds(NamedTuple):
    """Limits of one search, which is cut short when it reaches one."""

    num_children: int
    """Looked at. A node may have many thousands."""
    num_nodes: int
    """Visited below them, to follow the prompt, and again to count prompts."""


THOROUGH = Bounds(MAX_CHILDREN, MAX_NODES)
"""Bounds of a search that is a call of its own: it takes some 3 ms at most."""
BRIEF = Bounds(32, 64)
"""Bounds of a search for a prompt that is on its way to a worker: it takes some 0.2 ms at most."""

MAX_HOLDERS = 8
"""Holders of one child that are followed further down, at most."""


class ClosestPath(NamedTuple):
    """What another prompt that is cached has in common with this one."""

    num_equal_tokens: int
    """Tokens that both prompts share from position 0 on. Then they differ, or one of the prompts ends."""
    prompt_token: int | None
    cached_token: int | None
    """The other prompt's token after the shared ones; like `prompt_token` None if the prompt ends there."""
    num_different_tokens: int
    """Tokens of the prompt that differ from the cached ones in the block where the shared tokens end."""
    num_prompts: int
    """Cached prompts with `cached_token` there."""
    num_tokens_gained: int
    """Tokens that would be served beyond today if that block were the cached one's."""
    truncated: bool
    """The search was cut short: a closer prompt may exist, and `num_prompts` may be larger."""

    def rank(self) -> tuple[int, int]:
        """The larger, the more it helps to know of it."""
        return self.num_tokens_gained, self.num_equal_tokens


class _Sibling(NamedTuple):
    node: Node
    num_equal: int
    """Leading tokens that it has in common with the prompt's block."""


def find_closest(
    root: Node,
    path: list[Node],
    cached: Mapping[Holder, int],
    holders: Collection[Holder],
    tokens: bytes,
    block_size: int,
    bounds: Bounds = THOROUGH,
) -> ClosestPath | None:
    """The closest prompt that one of `holders` has; `path` are the nodes of the prompt below `root`, `cached` how many of them each
    holder has. None if all of the prompt is cached, and if nothing is that shares a token with it."""
    num_cached = max((count for holder, count in cached.items() if holder in holders), default=0)
    num_tokens = len(tokens) // TOKEN_BYTES
    step = block_size * TOKEN_BYTES
    wanted = tokens[num_cached * step : (num_cached + 1) * step]
    num_equal_before, max_hits = num_cached * block_size, (num_tokens - 1) // block_size
    if not wanted:
        return None
    parent = path[num_cached - 1] if num_cached else root
    children = list(islice(parent.iter_children(), bounds.num_children + 1))
    is_truncated = len(children) > bounds.num_children
    siblings = [
        _compared(child, wanted)
        for child in children[: bounds.num_children]
        if _is_in(child, holders) and child.tokens != wanted
    ]
    if not siblings:
        return None
    complete = {holder for holder in holders if cached.get(holder, 0) >= num_cached}
    follower = _Follower(tokens, block_size, max_hits, complete, bounds.num_nodes)
    best, gained = siblings[0], -1
    for sibling in siblings:
        gain = follower.num_served(sibling.node) if len(wanted) == step and num_cached < max_hits else 0
        if (gain, sibling.num_equal) > (gained, best.num_equal):
            best, gained = sibling, gain
    num_equal = best.num_equal
    if not num_equal_before + num_equal and not gained:
        return None
    is_at_end = num_equal * TOKEN_BYTES == len(wanted)
    common = wanted if is_at_end else best.node.tokens[: (num_equal + 1) * TOKEN_BYTES]
    prompts = _Prompts(bounds.num_nodes)
    num_prompts = sum(prompts.count(one.node) for one in siblings if one.node.tokens.startswith(common))
    return ClosestPath(
        num_equal_tokens=num_equal_before + num_equal,
        prompt_token=None if is_at_end else _token(wanted, num_equal),
        cached_token=None if is_at_end else _token(best.node.tokens, num_equal),
        num_different_tokens=0 if is_at_end else _num_different(wanted, best.node.tokens),
        num_prompts=num_prompts,
        num_tokens_gained=gained * block_size,
        truncated=is_truncated or follower.is_cut or prompts.is_cut,
    )


def _is_in(node: Node, holders: Collection[Holder]) -> bool:
    return any(holder in holders for holder in node.complete_holders())


def _token(tokens: bytes, index: int) -> int:
    return int.from_bytes(tokens[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES], "little")


def _compared(child: Node, wanted: bytes) -> _Sibling:
    """Compare a child with `wanted`, the prompt's next tokens. They differ, and `wanted` may be shorter than a block."""
    differing = int.from_bytes(child.tokens[: len(wanted)], "little") ^ int.from_bytes(wanted, "little")
    if not differing:
        return _Sibling(child, len(wanted) // TOKEN_BYTES)
    return _Sibling(child, ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES))


def _num_different(ours: bytes, theirs: bytes) -> int:
    """Tokens of `ours` that are others than those at their places in `theirs`, which may be longer."""
    return sum(
        one != other for one, other in zip(memoryview(ours).cast("I"), memoryview(theirs).cast("I"), strict=False)
    )


class _Follower:
    """Follows the rest of a prompt below siblings of its block, for a bounded number of nodes and a few holders each."""

    def __init__(
        self, tokens: bytes, block_size: int, max_hits: int, holders: Collection[Holder], num_nodes: int
    ) -> None:
        """`holders`: those that have all nodes before the siblings."""
        self._tokens = tokens
        self._step = block_size * TOKEN_BYTES
        self._max_hits = max_hits
        self._holders = holders
        self._nodes_left = num_nodes
        self.is_cut = False

    def num_served(self, sibling: Node) -> int:
        """Blocks, this one counted, that one holder would serve if the prompt had the sibling's tokens in place of its own."""
        node, depth = sibling, sibling.depth
        holders = [holder for holder in islice(node.complete_holders(), MAX_HOLDERS) if holder in self._holders]
        while holders:
            depth += 1
            if depth == self._max_hits:
                break
            if not self._nodes_left:
                self.is_cut = True
                break
            self._nodes_left -= 1
            child = node.find(self._tokens[depth * self._step : (depth + 1) * self._step])
            holders = [] if child is None else [holder for holder in holders if child.is_complete_in(holder)]
            node = child or node
        return depth - sibling.depth


class _Prompts:
    """Counts prompts, as ends of chains, for a bounded number of nodes."""

    def __init__(self, num_nodes: int) -> None:
        self._nodes_left = num_nodes
        self.is_cut = False

    def count(self, node: Node) -> int:
        """Prompts that begin with this node: at least 1."""
        ends = 0
        nodes: list[Iterable[Node]] = [(node,)]
        while nodes:
            for one in nodes.pop():
                if self._nodes_left <= 0:
                    self.is_cut = True
                    return max(1, ends)
                self._nodes_left -= 1
                if one.child is None and one.children is None:
                    ends += 1
                else:
                    nodes.append(islice(one.iter_children(), self._nodes_left + 1))
        return ends

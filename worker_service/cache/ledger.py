"""The worker's own record of its blocks: generation, users, and the content of each complete one. It outlives sessions.

It enforces the rule of one writer: a grant is accepted only with a larger generation and only for a block without users; a hit only
for a block whose KV this process has completed under the same generation, and only if it holds the prompt's tokens, after the same
prefix, under the same root. So a manager that is wrong, or was deceived, can make this worker give up a session, but not serve
another prompt's KV. Reports to the manager are built from this record.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as List
from typing import ClassVar, NamedTuple

from kvpool.v1 import common_pb2

from .entry import Entry


class DisagreementError(Exception):
    """The manager and this worker disagree on the state of a block. The session must be given up before a write."""


class Content:
    """What complete blocks hold, one in each group: tokens that follow those of the parent. Lives as long as a block or a child."""

    __slots__ = ("blocks", "parent", "root", "tokens")

    def __init__(self, parent: Content | None, root: common_pb2.Root, tokens: bytes, num_groups: int = 1) -> None:
        self.blocks = [0] * num_groups
        """The block that holds it in each group; 0: none was completed, or it was granted again."""
        self.parent = parent
        self.root = root
        self.tokens = tokens
        """block_size token ids, little-endian uint32."""


def _is_same_chain(content: Content, other: Content) -> bool:
    """Whether two contents hold the same tokens after equal prefixes under equal roots."""
    if content.root != other.root:
        return False
    above: Content | None = content
    above_other: Content | None = other
    while above is not above_other:
        if above is None or above_other is None or above.tokens != above_other.tokens:
            return False
        above, above_other = above.parent, above_other.parent
    return True


def _join(block: int, content: Content, before: Content | None) -> None:
    """Make `before` the parent of a content that was computed after a duplicate of it. Raises DisagreementError if it was not."""
    if content.parent is None or before is None or not _is_same_chain(content.parent, before):
        raise DisagreementError(f"block {block} was returned as cached after a prefix other than its own")
    # Later comparisons take one step.
    content.parent = before


def _other_tokens(blocks: List[int], pieces: List[bytes], tokens: bytes) -> DisagreementError:
    """Names the first block that does not hold its part of `tokens`; if all do, there are more tokens than blocks."""
    begin = 0
    for block, piece in zip(blocks, pieces, strict=True):
        if tokens[begin : begin + len(piece)] != piece:
            return DisagreementError(f"block {block} was returned as cached for a prompt with other tokens")
        begin += len(piece)
    return DisagreementError(
        f"{len(tokens)} bytes of tokens were reported as cached; the {len(blocks)} blocks returned hold {begin}"
    )


def _require_chain(block: int, last: Content, tokens: bytes, root: common_pb2.Root) -> None:
    """Check that a content and those before it are these tokens. Raises DisagreementError."""
    end = len(tokens)
    content: Content | None = last
    while content is not None:
        begin = end - len(content.tokens)
        if begin < 0 or tokens[begin:end] != content.tokens:
            raise DisagreementError(f"block {block} was returned as cached for a prompt with other tokens")
        content, end = content.parent, begin
    if end:
        raise DisagreementError(
            f"block {block} was returned as the end of {len(tokens)} bytes of tokens; it is {end} short"
        )
    if last.root != root:
        raise DisagreementError(f"block {block} was returned as cached under a root other than its own")


class WholeContent(NamedTuple):
    """A content of several blocks that is not part of a chain."""

    content: Content
    blocks: tuple[int, ...]


class BlockLedger:
    """Generations, table references and contents of the `num_blocks` blocks of a group; block 0 is the null block."""

    is_chained: ClassVar[bool] = True
    """Whether contents follow those of their parents; else each is whole, and listed by `whole_contents`."""

    def __init__(self, num_blocks: int, group: int = 0) -> None:
        self.num_blocks = num_blocks
        self.group = group
        self.num_used = 0
        """Blocks in at least one table."""
        self._generation = array("Q", bytes(8 * num_blocks))
        self._num_users = array("I", bytes(4 * num_blocks))
        self._contents: list[Content | None] = [None] * num_blocks
        self._idle: dict[int, None] = {}
        """Complete blocks in no table, least recently used first."""

    def accept_grant(self, block: int, generation: int) -> None:
        """Accept a block that is granted to this worker, empty. Raises DisagreementError."""
        self._check_range(block)
        if generation <= self._generation[block]:
            raise DisagreementError(
                f"block {block} was granted with generation {generation}, which is not larger than {self._generation[block]}"
            )
        if self._num_users[block]:
            raise DisagreementError(
                f"block {block} was granted (generation {generation}) while {self._num_users[block]} tables name it"
            )
        self._generation[block] = generation
        self.empty(block)

    def empty(self, block: int) -> None:
        """Forget what the block holds: it is to hold something else."""
        content = self._contents[block]
        if content is not None:
            if content.blocks[self.group] == block:  # else another block holds the same
                content.blocks[self.group] = 0
            self._contents[block] = None
            self._idle.pop(block, None)

    def accept_hits(
        self, blocks: List[int], generations: List[int], tokens: bytes, root: common_pb2.Root
    ) -> Content | None:
        """The manager returns these blocks as holding `tokens` from position 0 under `root`; returns the content of the last.
        Raises DisagreementError.

        A block's KV depends on its whole prefix, so each content must have been computed after the one before it in the list, or
        after a duplicate of that. Then all tokens are compared at once.
        """
        current, contents, num_blocks = self._generation, self._contents, self.num_blocks
        before: Content | None = None
        pieces: list[bytes] = []
        for block, generation in zip(blocks, generations, strict=True):
            content = contents[block] if 0 < block < num_blocks else None
            if content is None or generation != current[block]:
                raise self._not_held(block, generation)
            if content.parent is not before:
                _join(block, content, before)
            pieces.append(content.tokens)
            before = content
        if b"".join(pieces) != tokens:
            raise _other_tokens(blocks, pieces, tokens)
        # A content has its parent's root, so the last one is compared for all.
        if before is not None and before.root != root:
            raise DisagreementError(f"block {blocks[-1]} was returned as cached under a root other than its own")
        return before

    def accept_window(
        self, entries: List[Entry], last: Content | None, tokens: bytes, root: common_pb2.Root
    ) -> Content | None:
        """The manager returns these blocks as the end of what holds `tokens`; `last`: what another group has there, or None if no
        other group was asked. Returns the content at the end. Raises DisagreementError."""
        if not entries:
            return last
        contents = [self.held(entry.block, entry.generation) for entry in entries]
        if last is None:
            last = contents[-1]
            _require_chain(entries[-1].block, last, tokens, root)
        expected: Content | None = last
        for entry, content in zip(reversed(entries), reversed(contents), strict=True):
            if expected is None or (content is not expected and not _is_same_chain(content, expected)):
                raise DisagreementError(f"block {entry.block} was returned as cached after a prefix other than its own")
            expected = expected.parent
        return last

    def held(self, block: int, generation: int) -> Content:
        """The content of a block that the manager returns as cached. Raises DisagreementError."""
        content = self._contents[block] if 0 < block < self.num_blocks else None
        if content is None or generation != self._generation[block]:
            raise self._not_held(block, generation)
        return content

    def _not_held(self, block: int, generation: int) -> DisagreementError:
        """Why a block is no hit with that generation."""
        self._check_range(block)
        return DisagreementError(
            f"block {block} was returned as cached with generation {generation}; here it has generation "
            f"{self._generation[block]} and its KV is {'not complete' if self._contents[block] is None else 'complete'}"
        )

    def use(self, *blocks: int) -> None:
        """Note that one more table contains each of these blocks."""
        num_users, idle = self._num_users, self._idle
        for block in blocks:
            if not num_users[block]:
                self.num_used += 1
                idle.pop(block, None)
            num_users[block] += 1

    def drop(self, block: int) -> None:
        """Note that one table less contains the block."""
        self._num_users[block] -= 1
        if not self._num_users[block]:
            self.num_used -= 1
            if self._contents[block] is not None:
                self._idle[block] = None

    def complete(self, block: int, content: Content) -> None:
        """Note that a block in a table holds this content: the KV of all its slots is complete."""
        self._contents[block] = content
        content.blocks[self.group] = block

    def is_used(self, block: int) -> bool:
        """Whether a table contains the block."""
        return self._num_users[block] > 0

    def content(self, block: int) -> Content | None:
        """The content of a complete block; None for others."""
        return self._contents[block]

    @property
    def num_idle(self) -> int:
        """Complete blocks in no table, which can serve hits."""
        return len(self._idle)

    @property
    def holds_anything(self) -> bool:
        """Whether any block is in a table or can serve hits."""
        return bool(self.num_used or self._idle)

    def generation(self, block: int) -> int:
        """The generation of the block's last grant; 0: it was never granted."""
        return self._generation[block]

    # -- snapshots, for reports

    def generations(self) -> array[int]:
        """The generation of each block, by block id."""
        return self._generation[:]

    def idle_blocks(self) -> list[int]:
        """Complete blocks in no table, least recently used first."""
        return list(self._idle)

    def whole_contents(self) -> list[WholeContent]:
        """Contents that are in no chain, in no particular order."""
        return []

    def _check_range(self, block: int) -> None:
        if not 0 < block < self.num_blocks:
            raise DisagreementError(f"block {block} does not exist: the pool has blocks 1 to {self.num_blocks - 1}")

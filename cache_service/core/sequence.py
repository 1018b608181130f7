"""A live sequence as the manager knows it: tokens, block table, and its path in the prefix tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .messages import TOKEN_BYTES, SequenceKey

if TYPE_CHECKING:
    from .block_pool import BlockPool
    from .prefix_tree import Node
    from .session import Session


class Sequence:
    """One (sequence_id, attempt) on one session, in its current round."""

    __slots__ = (
        "fenced",
        "key",
        "nodes",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_named",
        "num_sealed",
        "root",
        "session",
        "table",
        "tokens",
    )

    def __init__(self, key: SequenceKey, session: Session, root: Node, tokens: bytes) -> None:
        self.key = key
        self.session = session
        self.root = root
        """Root node that `nodes` hang from."""
        self.tokens = bytearray(tokens)
        """All tokens known: the prompt and what Append has told since."""
        self.table: list[int] = []
        """Block ids, from position 0."""
        self.nodes: list[Node] = []
        """Path of the full blocks known: those of the prompt, and further ones as they are sealed."""
        self.num_sealed = 0
        """Leading blocks of the table that are sealed, hits included."""
        self.num_cached_tokens = 0
        """Tokens served from the cache when the sequence was granted."""
        self.num_computed_tokens = 0
        """Tokens whose KV the worker has reported as completed, hits included."""
        self.num_named = 0
        """Leading entries of the table that the worker is known to know."""
        self.fenced = False
        """A larger attempt lives elsewhere; only Free is still accepted."""

    def __repr__(self) -> str:
        key = self.key
        return (
            f"<Sequence {key.sequence_id!r} attempt={key.attempt} round={key.round} tokens={self.num_tokens} "
            f"computed={self.num_computed_tokens} table={self.table}{' fenced' if self.fenced else ''}>"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def pool(self) -> BlockPool:
        """The pool that its table's blocks belong to."""
        return self.session.pool

    def block_tokens(self, index: int) -> bytes:
        """The tokens of the full block at a table index."""
        step = self.pool.block_size * TOKEN_BYTES
        return bytes(self.tokens[index * step : (index + 1) * step])

    def token_count(self, index: int) -> int:
        """Slots of the block at a table index whose KV is known to be computed."""
        size = self.pool.block_size
        return max(0, min(size, self.num_computed_tokens - index * size))

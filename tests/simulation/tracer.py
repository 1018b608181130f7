"""A model whose text depends on every KV slot that it reads: any stale, foreign or unwritten slot changes the next token.

Slot (block, offset) holds a digest of root, token, position and the slot before; the next token is a hash of all slots that
are read through the block table. So each output has one right value, and each slot of a sequence too.
"""

from __future__ import annotations

import zlib

VOCAB_SIZE = 4093
EOS = frozenset(range(0, VOCAB_SIZE, 97))
_MASK = (1 << 61) - 1


def root_digest(tenant_salt: str) -> int:
    """What stands before position 0."""
    return zlib.crc32(tenant_salt.encode()) + 1


def slot(before: int, token: int, position: int) -> int:
    """What the slot of a token holds, `before`: the slot before it, or the root's digest."""
    return (before * 6364136223846793005 + token * 1442695040888963407 + position * 2654435761 + 97) & _MASK


def extend(slots: list[int], root: int, tokens: list[int], end: int) -> None:
    """Lengthen the right slots of a sequence up to position `end`."""
    before = slots[-1] if slots else root
    for position in range(len(slots), end):
        before = slot(before, tokens[position], position)
        slots.append(before)


def next_token(slots: list[int]) -> int:
    """The token behind a sequence of which these slots were read."""
    return hash(tuple(slots)) % VOCAB_SIZE


def right_text(tenant_salt: str, prompt: list[int], count: int) -> tuple[list[int], bool]:
    """The one right continuation of at most `count` tokens, and whether the model ends it there by itself."""
    slots: list[int] = []
    tokens = list(prompt)
    root = root_digest(tenant_salt)
    for _ in range(count):
        extend(slots, root, tokens, len(tokens))
        token = next_token(slots)
        if token in EOS:
            return tokens[len(prompt) :], True
        tokens.append(token)
    return tokens[len(prompt) :], False

"""A model whose text depends on every KV slot that it reads: any stale, foreign or unwritten slot changes the next token.

Slot (block, offset) holds a digest of root, token, position and the slot before; the next token is a hash of all slots that
are read through the block table. So each output has one right value, and each slot of a sequence too.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

VOCAB_SIZE = 4093
EOS = frozenset(range(0, VOCAB_SIZE, 97))
_MASK = (1 << 61) - 1


def root_digest(tenant_salt: str = "", encoder_tokens: Sequence[int] = ()) -> int:
    """What the slot before position 0 would hold. With `encoder_tokens`, an encoder's input, it depends on all slots with it."""
    if encoder_tokens:
        return digest_of(encoder_slots(encoder_tokens, tenant_salt))
    return zlib.crc32(tenant_salt.encode()) + 1


def extend(slots: list[int], root: int, tokens: Sequence[int]) -> None:
    """Lengthen the right slots of a sequence by those of its next tokens."""
    before = slots[-1] if slots else root
    for position, token in enumerate(tokens, len(slots)):
        before = (before * 6364136223846793005 + token * 1442695040888963407 + position * 2654435761 + 97) & _MASK
        slots.append(before)


def next_token(slots: Sequence[int | None], seed: int = 0) -> int:
    """The token after a sequence of which these slots were read, drawn with a seed."""
    return (hash(tuple(slots)) + seed * 1009) % VOCAB_SIZE


def best_tokens(slots: Sequence[int | None], count: int) -> list[tuple[int, float]]:
    """The likeliest tokens after a sequence of which these slots were read, and their log-probabilities."""
    first = hash(tuple(slots))
    apart = 1 + (first >> 20) % 1000  # the number of tokens is a prime, so no two are the same
    ids = [(first + rank * apart) % VOCAB_SIZE for rank in range(count)]
    steps = (1 + (first >> (3 * rank) & 7) for rank in range(count))
    logprobs = accumulate(-0.125 * step for step in steps)
    return list(zip(ids, logprobs, strict=True))


def expected_text(
    prompt: Sequence[int],
    count: int,
    tenant_salt: str = "",
    eos_token_ids: Collection[int] = (),
    seed: int = 0,
    encoder_tokens: Sequence[int] = (),
) -> list[int]:
    """The one right continuation: `count` tokens, fewer if one of `eos_token_ids` comes next. With `encoder_tokens`, an encoder's
    input, `prompt` is the beginning of the decoder's text."""
    slots: list[int] = []
    text: list[int] = []
    root = root_digest(tenant_salt, encoder_tokens)
    extend(slots, root, prompt)
    while len(text) < count and (token := next_token(slots, seed)) not in eos_token_ids:
        text.append(token)
        extend(slots, root, [token])
    return text


def encoder_slots(tokens: Sequence[int], tenant_salt: str = "") -> list[int]:
    """The right slots of an encoder's input."""
    slots: list[int] = []
    extend(slots, root_digest(tenant_salt), tokens)
    return slots


def digest_of(slots: Sequence[int | None]) -> int:
    """The same of slots that were read."""
    return hash((len(slots), *slots)) & _MASK


SlotT = TypeVar("SlotT")


class AnySlots(Generic[SlotT]):
    """The KV slots of a device; None: not written yet."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[SlotT | None] = [None] * (num_blocks * block_size)

    def read(self, table: Sequence[int], end: int) -> list[SlotT | None]:
        """The slots of positions 0 … end − 1, through a block table."""
        found: list[SlotT | None] = []
        for block in table[: -(-end // self.block_size)]:
            found += self.block(block)
        del found[end:]
        return found

    def write(self, table: Sequence[int], start: int, contents: Sequence[SlotT | None]) -> None:
        """Fill the slots from position `start` on, through a block table."""
        size = self.block_size
        for position, content in enumerate(contents, start):
            self.slots[table[position // size] * size + position % size] = content

    def copy(self, source: int, target: int) -> None:
        """Copy a whole block, unwritten slots too."""
        size = self.block_size
        self.slots[target * size : (target + 1) * size] = self.block(source)

    def block(self, block: int) -> list[SlotT | None]:
        return self.slots[block * self.block_size : (block + 1) * self.block_size]


class Slots(AnySlots[int]):
    """Those of this model: digests."""

"""Sequence id and seed of each answer of a request. Workers name forks by them, clients continue answers with them."""

from __future__ import annotations

from typing import Final

ID_SUFFIX_BYTES: Final = 12
"""Bytes of MAX_ID_BYTES that are reserved for the suffixes of a request's further sequences."""
_SEEDS: Final = 2**64


def answer_id(sequence_id: str, index: int) -> str:
    """Return the sequence id of the answer with that index. The first answer has the request's own."""
    return sequence_id if index == 0 else f"{sequence_id}.{index}"


def asked_id(name: str) -> str | None:
    """Return the id of the request whose further answer could have this name; None: no request's could."""
    asked, dot, number = name.rpartition(".")
    return asked if dot and number.isdecimal() else None


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of the answer with that index, so that n answers equal those of n requests with these seeds."""
    return (seed + index) % _SEEDS

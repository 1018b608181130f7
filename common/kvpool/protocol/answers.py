"""The answers of one request: which sequence each of them is, and what it draws with. Workers name forks so, clients go on so."""

from __future__ import annotations

from typing import Final

ID_SUFFIX_BYTES: Final = 12
"""What is left of MAX_ID_BYTES for the names of a request's further sequences."""
_SEEDS: Final = 2**64


def answer_id(sequence_id: str, index: int) -> str:
    """Name of the sequence of the request's answer with that index. The first has the request's own."""
    return sequence_id if index == 0 else f"{sequence_id}.{index}"


def asked_id(name: str) -> str | None:
    """Name of the request whose further answer that could be; None if it could be none's."""
    asked, dot, number = name.rpartition(".")
    return asked if dot and number.isdecimal() else None


def answer_seed(seed: int, index: int) -> int:
    """What the answer with that index draws with: so n answers are those of n requests with these seeds."""
    return (seed + index) % _SEEDS

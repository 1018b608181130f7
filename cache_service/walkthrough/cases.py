"""The cases, in the order in which they are best read."""

from __future__ import annotations

from typing import Final

from . import allocation, chain, eviction, prefix
from .recording import Case

CASES: Final[dict[str, Case]] = {case.name: case for case in (allocation.CASE, prefix.CASE, chain.CASE, eviction.CASE)}

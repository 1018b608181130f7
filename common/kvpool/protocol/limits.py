"""What the two ends of a call may send each other."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Largest message, both ways: four prompts of a million tokens."""

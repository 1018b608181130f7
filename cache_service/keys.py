"""Makes session keys: the core has no randomness of its own."""

from __future__ import annotations

import secrets

from .core.session_key import SessionKey

SESSION_KEY_BYTES = 16


def make_session_key() -> SessionKey:
    """Make a secret from the operating system's source of randomness."""
    return SessionKey(secrets.token_bytes(SESSION_KEY_BYTES))

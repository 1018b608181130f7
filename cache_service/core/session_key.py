"""The secret that a session's calls carry: who knows it is the worker that began the session."""

from __future__ import annotations

from hmac import compare_digest


class SessionKey(bytes):
    """A session's secret. Its text is the same for every key, so that none is shown by a log line, a repr or an error message."""

    __slots__ = ()

    def matches(self, stated: bytes) -> bool:
        """Whether `stated` is this key. The time taken does not depend on where the two differ."""
        return compare_digest(self, stated)

    def __repr__(self) -> str:
        return "<session key>"

    __str__ = __repr__


NO_KEY = SessionKey()
"""The key of a session whose worker calls the core in the same process and needs none. The edge gives every session a key."""

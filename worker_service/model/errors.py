"""Errors of a model or its settings."""

from __future__ import annotations


class ModelError(RuntimeError):
    """The model cannot be served. The message says what was needed, what there is, and what to change."""


class UnsupportedModel(ModelError):
    """Paged attention over packed rows would compute this architecture wrongly."""


class KVCacheTooLarge(ModelError):
    """The requested KV cache does not fit into the device's memory."""

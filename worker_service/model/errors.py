"""What can be wrong with a model or with the settings it is loaded with."""

from __future__ import annotations


class ModelError(RuntimeError):
    """The model cannot be served. The message says what was needed, what there is, and what to change."""


class UnsupportedModel(ModelError):
    """The architecture does something that paged attention over packed rows would compute wrongly."""


class KVCacheTooLarge(ModelError):
    """The KV cache asked for does not fit into the device's memory."""

"""Why a model is computed by transformers' modules."""

from __future__ import annotations


class NotNative(Exception):
    """The native step cannot compute this model, or not here; the message is the reason, for one line of the log."""

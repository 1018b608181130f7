"""The bytes of tokens, for the models used last, and their form in OpenAI's API."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from kvpool.client import Model
from kvpool.client.token_bytes import TokenBytes

_known: Final = lru_cache(8)(TokenBytes)
"""By tokenizer, since reading a vocabulary takes milliseconds."""


def token_bytes(model: Model) -> TokenBytes | None:
    """Return the bytes of a model's tokens; None: it has no tokenizer."""
    return None if model.tokenizer is None else _known(model.tokenizer)


def shown(raw: bytes) -> str:
    """Return a token as text; if its bytes are no whole text, as `bytes:\\xe2\\x82`, which is OpenAI's form."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

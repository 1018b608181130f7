"""The bytes of tokens, for the models used last, and their form in OpenAI's API."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvpool.client import Model
from kvpool.client.token_bytes import TokenBytes

MAX_KNOWN: Final = 8


class TokenBytesOfModels:
    """Caches TokenBytes for the models used last, since reading a vocabulary takes milliseconds."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, TokenBytes] = OrderedDict()

    def of(self, model: Model) -> TokenBytes | None:
        """Return the TokenBytes of a model; None: it has no tokenizer."""
        if model.tokenizer is None:
            return None
        tokens = self._known.pop(model.fingerprint, None)
        if tokens is None or not tokens.is_of(model.tokenizer):  # other files may have come for the same weights
            tokens = TokenBytes(model.tokenizer)
        self._known[model.fingerprint] = tokens
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return tokens


def shown(raw: bytes) -> str:
    """Return a token as text; if its bytes are no whole text, as `bytes:\\xe2\\x82`, which is OpenAI's form."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

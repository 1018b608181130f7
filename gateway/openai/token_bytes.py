"""The bytes of the tokens of the models used last, and how OpenAI's API shows a token."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvpool.client import Model
from kvpool.client.token_bytes import TokenBytes

MAX_KNOWN: Final = 8


class TokenBytesOfModels:
    """Kept for the models used last: to read a vocabulary takes milliseconds."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, TokenBytes] = OrderedDict()

    def of(self, model: Model) -> TokenBytes | None:
        """None: the model has no tokenizer."""
        if model.tokenizer is None:
            return None
        known = self._known.pop(model.fingerprint, None)
        if known is None or not known.is_of(model.tokenizer):  # other files may have come for the same weights
            known = TokenBytes(model.tokenizer)
        self._known[model.fingerprint] = known
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known


def shown(raw: bytes) -> str:
    """A token as text; one that is no whole text as `bytes:\\xe2\\x82`, as OpenAI writes it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

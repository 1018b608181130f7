"""Encodes tokens and their log-probabilities in OpenAI's two forms, for chats and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from kvpool.client import Model, TokenLogprobs
from kvpool.client.token_bytes import TokenBytes

LEAST: Final = -9999.0
"""Value for a probability of zero, whose logarithm JSON cannot write; OpenAI uses the same."""
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


def chat_logprobs(tokens: TokenBytes, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Encode tokens of a chat."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokens.of(token_id)
        return {"token": shown(raw), "logprob": max(logprob, LEAST), "bytes": list(raw)}

    content = [
        entry(token_id, at_token.logprob) | {"top_logprobs": [entry(*other) for other in at_token.top]}
        for token_id, at_token in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Encodes the tokens of one choice of a completion. `text_offset` counts characters of the choice's text from 0, the echoed
    prompt included."""

    def __init__(self, tokens: TokenBytes, num_top: int, *, before: Sequence[int] = ()) -> None:
        """`before` is the prompt, if it is not echoed. It matters because many decoders leave out the first space of a text."""
        self._tokens = tokens
        self._num_top = num_top
        self._decoder = tokens.decoder()
        self._offset = 0
        has_begun = any(not tokens.is_special(token_id) and tokens.of(token_id).strip(b" ") for token_id in before)
        self._first = None if has_begun else list(before)
        """The tokens so far; None: a word has begun, so they do not matter any more."""
        self._num_stripped_before = 0 if has_begun else tokens.num_stripped(before)
        self._num_stripped = 0

    def encode(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Encode the next tokens. The first token of a prompt has no log-probability: null."""
        encoded: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, at_token in zip(token_ids, logprobs, strict=True):
            encoded["tokens"].append(shown(self._tokens.of(token_id)))
            encoded["text_offset"].append(self._offset - self._num_stripped)
            encoded["token_logprobs"].append(None if at_token is None else max(at_token.logprob, LEAST))
            encoded["top_logprobs"].append(None if at_token is None else self._top(token_id, at_token))
            if not self._tokens.is_special(token_id):
                piece = self._decoder.decode(self._tokens.of(token_id))
                self._offset += len(piece)
                if self._first is not None:
                    self._first.append(token_id)
                    self._num_stripped = self._tokens.num_stripped(self._first) - self._num_stripped_before
                    self._first = None if piece.strip(" ") else self._first
        return encoded

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return the log-probabilities of the most likely tokens, and of the one that was taken."""
        top = {shown(self._tokens.of(other)): max(logprob, LEAST) for other, logprob in logprobs.top[: self._num_top]}
        top.setdefault(shown(self._tokens.of(token_id)), max(logprobs.logprob, LEAST))
        return top


def prompt_logprobs(
    tokens: TokenBytes, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Encode the log-probabilities of a prompt as vLLM does: for each token, by id; null for the first."""
    entries: list[dict[str, Any] | None] = []
    for token_id, at_token in zip(token_ids, logprobs, strict=True):
        if at_token is None:
            entries.append(None)
            continue
        ranked = {str(other): (logprob, rank) for rank, (other, logprob) in enumerate(at_token.top, 1)}
        ranked.setdefault(str(token_id), (at_token.logprob, None))  # type: ignore[arg-type]
        entries.append(
            {
                other: {
                    "logprob": max(logprob, LEAST),
                    "rank": rank,
                    "decoded_token": shown(tokens.of(int(other))),
                }
                for other, (logprob, rank) in ranked.items()
            }
        )
    return entries

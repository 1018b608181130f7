"""Log-probabilities in OpenAI's two forms: those of chats, and those of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvpool.client import TokenLogprobs
from kvpool.client.token_bytes import TokenBytes

from .token_bytes import shown

LEAST: Final = -9999.0
"""For a probability of zero, which JSON has no logarithm for; OpenAI writes the same."""


class ChatLogprobs:
    """Encodes the tokens of one choice of a chat."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens

    def encode(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of the next tokens."""
        content = []
        for token_id, found in zip(token_ids, logprobs, strict=True):
            entry = self._entry(token_id, found.logprob)
            entry["top_logprobs"] = [self._entry(other, logprob) for other, logprob in found.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokens.of(token_id)
        return {"token": shown(raw), "logprob": max(logprob, LEAST), "bytes": list(raw)}


class CompletionLogprobs:
    """Encodes the tokens of one choice of a completion. `text_offset` counts characters of the choice's text, from 0: that of the
    prompt too, if it is echoed."""

    def __init__(self, tokens: TokenBytes, num_top: int, *, before: Sequence[int] = ()) -> None:
        """`before`: the prompt, if it is not echoed. Many decoders leave out the first space of a text."""
        self._tokens = tokens
        self._num_top = num_top
        self._decoder = tokens.decoder()
        self._offset = 0
        has_begun = any(not tokens.is_special(one) and tokens.of(one).strip(b" ") for one in before)
        self._first = None if has_begun else list(before)
        """The tokens so far, until a word has begun."""
        self._num_stripped_before = 0 if has_begun else tokens.num_stripped(before)
        self._num_stripped = 0

    def encode(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of the next tokens. The first token of a prompt has no log-probability: null."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, one in zip(token_ids, logprobs, strict=True):
            found["tokens"].append(shown(self._tokens.of(token_id)))
            found["text_offset"].append(self._offset - self._num_stripped)
            found["token_logprobs"].append(None if one is None else max(one.logprob, LEAST))
            found["top_logprobs"].append(None if one is None else self._top(token_id, one))
            if not self._tokens.is_special(token_id):
                piece = self._decoder.decode(self._tokens.of(token_id))
                self._offset += len(piece)
                if self._first is not None:
                    self._first.append(token_id)
                    self._num_stripped = self._tokens.num_stripped(self._first) - self._num_stripped_before
                    self._first = None if piece.strip(" ") else self._first
        return found

    def _top(self, token_id: int, one: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, and the one that was taken."""
        top = {shown(self._tokens.of(other)): max(logprob, LEAST) for other, logprob in one.top[: self._num_top]}
        top.setdefault(shown(self._tokens.of(token_id)), max(one.logprob, LEAST))
        return top


def prompt_logprobs(
    tokens: TokenBytes, token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """As vLLM writes those of a prompt: for each token, by id; null for the first."""
    listed: list[dict[str, Any] | None] = []
    for token_id, one in zip(token_ids, found, strict=True):
        if one is None:
            listed.append(None)
            continue
        ranked = {str(other): (logprob, rank) for rank, (other, logprob) in enumerate(one.top, 1)}
        ranked.setdefault(str(token_id), (one.logprob, None))  # type: ignore[arg-type]
        listed.append(
            {
                other: {
                    "logprob": max(logprob, LEAST),
                    "rank": rank,
                    "decoded_token": shown(tokens.of(int(other))),
                }
                for other, (logprob, rank) in ranked.items()
            }
        )
    return listed

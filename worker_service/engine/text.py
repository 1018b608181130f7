"""From token ids to text, one token at a time: decoding, and looking for stop strings."""

from __future__ import annotations

from collections.abc import Sequence as List

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

PROMPT_TAIL_TOKENS = 6
"""Prompt tokens that the decoder sees first: some tokenizers decode a token differently at the beginning of a text."""


def _decode_stream(prompt: List[int]) -> DecodeStream:
    return DecodeStream(ids=list(prompt[-PROMPT_TAIL_TOKENS:]), skip_special_tokens=True)


class TextDecoder:
    """Decodes a growing sequence of tokens and holds back what may still change: bytes of an incomplete character, and the end of
    the text as far as it could become a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: List[int], stop_strings: List[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = _decode_stream(prompt)
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.is_stopped = False
        """Whether a stop string was met; it is not part of the text."""

    def add(self, token_id: int) -> str:
        """The text that has become certain with this token."""
        piece = self._stream.step(self._tokenizer, token_id)
        if not piece:
            return ""
        text = self._held + piece
        found = [position for position in (text.find(stop) for stop in self._stop_strings) if position >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)]
        keep = self._num_held_back(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back; call it when no token follows."""
        held, self._held = self._held, ""
        return held

    def _num_held_back(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if text.endswith(tuple(stop[:length] for stop in self._stop_strings if len(stop) > length)):
                return length
        return 0

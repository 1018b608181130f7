"""From token ids to text, one token at a time, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence as List
from copy import copy

from tokenizers import Tokenizer

PROMPT_TAIL_TOKENS = 16
"""Prompt tokens decoded together with the first new ones: some tokenizers decode a token differently at the start of a text."""

MAX_PROMPT_TAIL_LOOKED_AT = 256
"""Tokens of the prompt's end that are searched for them: special tokens have no text and do not count."""

MAX_WINDOW_TOKENS = 64
"""Largest run of tokens kept because their text may depend on what follows; no known tokenizer needs more than two."""

MAX_PENDING_TOKENS = 8
"""A character has at most four bytes, so bytes that are incomplete after this many tokens stay so."""

MAX_CUT_TOKENS = 3
"""A window that starts inside a character starts with at most three of its bytes."""

MAX_REPLAYED_TOKENS = 4096
"""Delivered tokens decoded again at most. Text still held back is much shorter: a stop string has at most 256 bytes."""

_REPLACEMENT = "\ufffd"


class _Decoder:
    """Decodes token by token: the new text is what a window of the last tokens decodes to, less what it decoded to before.

    The window starts with the last tokens whose text was returned, because they decide how the next one decodes: many tokenizers
    strip the space at the start of a text. A token costs two decodings of a few tokens. Never raises, for any ids: if a tokenizer
    revises earlier characters, the revision is lost.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: List[int]) -> None:
        self._tokenizer = tokenizer
        tail = self._tail(prompt)
        self._ids, self._num_returned = self._window([prompt[index] for index in tail])
        """The window, and how many of its leading ids have had their text returned: all but the bytes of a character that the
        prompt leaves incomplete, which belongs to the answer."""
        num_pending = len(self._ids) - self._num_returned
        self._num_prompt_returned = tail[-num_pending] if num_pending else len(prompt)
        self._returned = self._decode(self._ids[: self._num_returned])
        """Text of the first `_num_returned` ids."""
        self._text = self._decode(self._ids)

    def copy(self) -> _Decoder:
        """One that goes on by itself from here."""
        again = copy(self)
        again._ids = list(self._ids)
        return again

    def _tail(self, prompt: List[int]) -> list[int]:
        """Indices of the prompt's last tokens that decoding does not skip, in order."""
        tail: list[int] = []
        for index in range(len(prompt) - 1, max(-1, len(prompt) - 1 - MAX_PROMPT_TAIL_LOOKED_AT), -1):
            if not self._is_skipped(prompt[index]):
                tail.append(index)
                if len(tail) == PROMPT_TAIL_TOKENS:
                    break
        return tail[::-1]

    def _window(self, tail: list[int]) -> tuple[list[int], int]:
        for end in range(len(tail), 0, -1):
            for begin in range(min(end, MAX_CUT_TOKENS + 1)):
                if _REPLACEMENT not in self._decode(tail[begin:end]):
                    return tail[begin:], end - begin
        return [], 0

    def _decode(self, ids: List[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def prompt_text(self, prompt: List[int]) -> str:
        """The text of the prompt given to __init__, up to where the text of `add` continues it."""
        return self._decode(prompt[: self._num_prompt_returned])

    def add(self, token_id: int) -> str:
        """Text that the token completes; empty while a character's bytes are incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text == self._text and self._is_skipped(token_id):
            # Skipped at any place. In the window, a run of such tokens would leave no context for what follows.
            self._ids.pop()
            return ""
        self._text = text
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._num_returned < MAX_PENDING_TOKENS:
            return ""
        return self._take_piece()

    def finish(self) -> str:
        """The text of pending tokens; incomplete characters as U+FFFD."""
        return self._take_piece() if self._num_returned < len(self._ids) else ""

    def _is_skipped(self, token_id: int) -> bool:
        """Whether decoding skips the token: a special token, or an id outside the vocabulary."""
        if self._tokenizer.id_to_token(token_id) is None:
            return True
        return not self._decode([token_id]) and bool(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _take_piece(self) -> str:
        piece = self._text[len(self._returned) :]
        if piece:
            self._ids = self._ids[self._num_returned :]
        elif len(self._ids) > MAX_WINDOW_TOKENS:
            self._ids = self._ids[-PROMPT_TAIL_TOKENS:]
        # Else the new ids have no text yet. The ids before them stay: alone, the new ones would start a text.
        self._num_returned = len(self._ids)
        self._returned = self._text = self._decode(self._ids)
        return piece


class TextDecoder:
    """Decodes a growing sequence of tokens and holds back what may still change: bytes of an incomplete character, and an end of
    the text that could become a stop string.

    The prompt's last `num_delivered` tokens count as already added, and their text as returned; text that the earlier attempt
    held back is returned here. A stop string completed by one of the first `min_tokens` tokens does not count. With `echo`, the
    first text is the prompt's, if nothing was delivered.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: List[int],
        stop_strings: List[str],
        *,
        num_delivered: int = 0,
        min_tokens: int = 0,
        echo: bool = False,
    ) -> None:
        first_added = len(prompt) - min(num_delivered, MAX_REPLAYED_TOKENS)
        self._decoder = _Decoder(tokenizer, prompt[:first_added])
        self._stop_strings = tuple(stop_strings)
        self._num_early = min_tokens - (num_delivered - (len(prompt) - first_added))
        """Tokens to come before a stop string counts; may be negative."""
        self._held = ""
        self._echo = ""
        self.is_stopped = False
        """Whether a stop string was met; it is not part of the text."""
        for token_id in prompt[first_added:]:
            self.add(token_id)
        if echo and not num_delivered:
            self._echo = self._decoder.prompt_text(prompt)

    def copy(self) -> TextDecoder:
        """One that goes on by itself from here: that of a fork."""
        again = copy(self)
        again._decoder = self._decoder.copy()
        return again

    def add(self, token_id: int) -> str:
        """The text that is certain with this token."""
        echo, self._echo = self._echo, ""
        return echo + self._add(token_id)

    def _add(self, token_id: int) -> str:
        self._num_early -= 1
        piece = self._decoder.add(token_id)
        if not piece or not self._stop_strings:
            return piece
        text = self._held + piece
        found = [] if self._num_early >= 0 else self._find_stops(text)
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)]
        keep = self._num_held_back(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, for when no token follows. Nothing after a stop string."""
        echo, self._echo = self._echo, ""
        held, self._held = self._held, ""
        return echo + ("" if self.is_stopped else held + self._decoder.finish())

    def _find_stops(self, text: str) -> list[int]:
        """Where stop strings begin that end after the text held back: one that ends within it came too early to count."""
        begins = (text.find(stop, max(0, len(self._held) - len(stop) + 1)) for stop in self._stop_strings)
        return [begin for begin in begins if begin >= 0]

    def _num_held_back(self, text: str) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if text.endswith(tuple(stop[:length] for stop in self._stop_strings if len(stop) > length)):
                return length
        return 0

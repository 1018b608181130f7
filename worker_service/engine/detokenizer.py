"""Decodes token ids to text, one token at a time, and searches for stop strings."""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Sequence as List
from copy import copy

from tokenizers import Tokenizer

from kvpool.protocol.byte_level import spelled_bytes
from kvpool.protocol.text_bound import parts

PROMPT_TAIL_TOKENS = 16
"""Prompt tokens decoded together with the first new ones: some tokenizers decode a token differently at the start of a text."""

MAX_PROMPT_TAIL_LOOKED_AT = 256
"""Tokens of the prompt's end that are searched for them: special tokens have no text and do not count."""

MAX_WINDOW_TOKENS = 64
"""Largest run of tokens kept because their text may depend on what follows; no known tokenizer needs more than two."""

MAX_REPLAYED_TOKENS = 4096
"""Delivered tokens decoded again at most. Text still held back is much shorter: a stop string has at most 256 bytes."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""SentencePiece's spelling of a byte; other tokens are text."""
_REPLACEMENT_BYTES = "\ufffd".encode()


class _Decoder:
    """Decodes token by token: the new text is what a window of the last tokens decodes to, less what it decoded to before.

    The window starts with the last tokens whose text was returned, because they decide how the next one decodes: many tokenizers
    strip the space at the start of a text. A token costs two decodings of a few tokens. Never raises, for any ids: if a tokenizer
    revises earlier characters, the revision is lost.

    Only the bytes of a character that is not complete yet are held back: three at most, and so three tokens. Bytes that no later
    token can complete are U+FFFD. What that is for bytes of byte-level BPE is the tokenizer's own choice: one for as many bytes as
    might have begun a character. With SentencePiece's byte tokens it is one for each byte that belongs to no character. There the
    tokenizer itself, given all tokens at once, makes U+FFFD of the good characters next to a bad byte too; these have been
    returned by then, and stay.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: List[int]) -> None:
        self._tokenizer = tokenizer
        kinds = {part["type"] for part in parts(tokenizer.decoder, "decoders")}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._ids: list[int] = []
        """The window. Byte tokens that belong to no character are replaced by those of U+FFFD, and those of a character that is not
        complete are in `_pending`: so the window decodes alike, whatever follows."""
        self._pending: list[int] = []
        self._unfinished = b""
        """Bytes at the end that may begin a character: those of `_pending`, or in a byte-level vocabulary of the last ids."""
        tail = self._tail(prompt)
        for index in tail:
            self._append(prompt[index])
        self._num_prompt_returned = tail[-len(self._pending)] if self._pending else len(prompt)
        self._returned_all()

    def copy(self) -> _Decoder:
        """A copy that goes on by itself from here."""
        again = copy(self)
        again._ids, again._pending = list(self._ids), list(self._pending)
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

    def _decode(self, ids: List[int]) -> str:
        """The text of the ids, but for a character that is not complete."""
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        is_inside = bool(self._unfinished) and not self._pending
        return text[:-1] if is_inside else text

    def prompt_text(self, prompt: List[int]) -> str:
        """The text of the prompt given to __init__, up to where the text of `add` continues it."""
        return self._decode(prompt[: self._num_prompt_returned])

    def add(self, token_id: int) -> str:
        """Text that the token completes; empty while a character's bytes are incomplete."""
        if self._is_skipped(token_id):
            # Skipped at any place. In the window, a run of such tokens would leave no context for what follows.
            return ""
        self._append(token_id)
        return self._take_piece()

    def finish(self) -> str:
        """The text of pending tokens; incomplete characters as U+FFFD."""
        self._give_pending_up()
        self._unfinished = b""
        return self._take_piece()

    def _is_skipped(self, token_id: int) -> bool:
        """Whether decoding skips the token: a special token, or an id outside the vocabulary."""
        if self._tokenizer.id_to_token(token_id) is None:
            return True
        if self._tokenizer.decode([token_id], skip_special_tokens=True):
            return False
        return bool(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _append(self, token_id: int) -> None:
        """Add a token that is not skipped."""
        token = str(self._tokenizer.id_to_token(token_id))
        if self._is_byte_level:
            self._ids.append(token_id)
            self._unfinished = _unfinished(self._unfinished + spelled_bytes(token))
            return
        match = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if match is None:
            self._give_pending_up()
            self._ids.append(token_id)
            return
        byte = bytes([int(match[1], 16)])
        if not _is_text(self._unfinished + byte):
            self._give_pending_up()
        self._pending.append(token_id)
        self._unfinished += byte
        if not _is_text(self._unfinished):
            self._give_pending_up()
        elif not _unfinished(self._unfinished):
            self._ids += self._pending
            self._pending, self._unfinished = [], b""

    def _give_pending_up(self) -> None:
        """Give up the character that the pending bytes begin: no later token completes it."""
        if self._pending:
            names = [f"<0x{byte:02X}>" for byte in _REPLACEMENT_BYTES]
            replacement_ids = [
                token_id for name in names if (token_id := self._tokenizer.token_to_id(name)) is not None
            ]
            self._ids += replacement_ids * len(self._pending) if len(replacement_ids) == len(names) else self._pending
            self._pending, self._unfinished = [], b""

    def _take_piece(self) -> str:
        piece = self._decode(self._ids)[self._num_chars :]
        if piece:
            self._ids = self._ids[self._num_returned :]
        elif len(self._ids) > MAX_WINDOW_TOKENS:
            self._ids = self._ids[-PROMPT_TAIL_TOKENS:]
        # Else the new ids have no text yet. The ids before them stay: alone, the new ones would start a text.
        self._returned_all()
        return piece

    def _returned_all(self) -> None:
        self._num_returned = len(self._ids)
        """Leading ids of the window whose text was returned."""
        self._num_chars = len(self._decode(self._ids))
        """Characters of the window's text that were returned."""


def _unfinished(data: bytes) -> bytes:
    """The bytes at the end, at most three, that more bytes may complete to a character."""
    _, num_decided = utf_8_decode(data, "replace", False)
    return data[num_decided:]


def _is_text(data: bytes) -> bool:
    """Whether the bytes are UTF-8, or its beginning."""
    try:
        utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


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
        """A copy that goes on by itself from here, for a fork."""
        again = copy(self)
        again._decoder = self._decoder.copy()
        return again

    def add(self, token_id: int) -> str:
        """The text that is certain with this token."""
        echo, self._echo = self._echo, ""
        self._num_early -= 1
        piece = self._decoder.add(token_id)
        if not piece or not self._stop_strings:
            return echo + piece
        text = self._held + piece
        stops = [] if self._num_early >= 0 else self._find_stops(text)
        if stops:
            self.is_stopped = True
            self._held = ""
            return echo + text[: min(stops)]
        keep = self._num_held_back(text)
        self._held = text[len(text) - keep :]
        return echo + text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, for when no token follows. Nothing after a stop string."""
        echo, self._echo = self._echo, ""
        held_back, self._held = self._held, ""
        return echo + ("" if self.is_stopped else held_back + self._decoder.finish())

    def _find_stops(self, text: str) -> list[int]:
        """Indices at which stop strings begin that end after the text held back: one that ends within it came too early to
        count."""
        begins = (text.find(stop, max(0, len(self._held) - len(stop) + 1)) for stop in self._stop_strings)
        return [begin for begin in begins if begin >= 0]

    def _num_held_back(self, text: str) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if text.endswith(tuple(stop[:length] for stop in self._stop_strings if len(stop) > length)):
                return length
        return 0

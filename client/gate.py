"""Takes each token of an answer once, whichever attempt sends it."""

from __future__ import annotations

from .errors import ProtocolError


class Gate:
    """Takes a token only for the current attempt and at its next position (docs/ARCHITECTURE.md).

    Workers count positions from 0 in each stream; the gate knows how many tokens earlier attempts delivered, so a
    continuation on another worker joins on without a token twice or a hole.
    """

    def __init__(self) -> None:
        self.num_delivered = 0
        """Tokens taken so far, over all attempts."""
        self.base = 0
        """Tokens that earlier attempts delivered."""
        self._attempt = 0
        self._num_prompt_delivered = 0
        self._num_prompt_of_attempt = 0

    def __repr__(self) -> str:
        return f"Gate(attempt={self._attempt}, base={self.base}, num_delivered={self.num_delivered})"

    def open(self, attempt: int) -> None:
        """Let only `attempt`, which must be larger than any before, deliver. Its positions count from the next token of the
        answer."""
        assert attempt > self._attempt, (attempt, self._attempt)
        self._attempt = attempt
        self.base = self.num_delivered
        self._num_prompt_of_attempt = 0

    def take(self, attempt: int, start_index: int, num_tokens: int) -> int | None:
        """Accept `num_tokens` tokens at `start_index` of the attempt's stream. Returns the index of the first of them in the
        answer; None: the attempt is an older one, and they are to be dropped.

        ProtocolError if they are not at the next position. Without tokens only the attempt is checked.
        """
        if attempt != self._attempt:
            return None
        position = self.base + start_index
        if num_tokens and position != self.num_delivered:
            raise ProtocolError(
                f"the worker sent tokens at position {start_index} of attempt {attempt}, "
                f"the next one is {self.num_delivered - self.base}",
                reason="OUT_OF_ORDER",
            )
        self.num_delivered += num_tokens
        return self.num_delivered - num_tokens

    def take_prompt(self, num_entries: int) -> int:
        """Accept log-probabilities of the prompt's next `num_entries` tokens. Returns how many of them, from the first on, an
        earlier attempt has delivered."""
        self._num_prompt_of_attempt += num_entries
        num_new = max(0, self._num_prompt_of_attempt - self._num_prompt_delivered)
        self._num_prompt_delivered += num_new
        return num_entries - num_new

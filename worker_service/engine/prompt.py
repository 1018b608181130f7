"""Prompts: checked for length first, then tokenised, and split for a model whose prompt feeds an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from kvpool.protocol.text_bound import TextBound, text_measure

from .errors import invalid


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Limits of the encoder's input, and how every text of the decoder begins."""

    max_tokens: int
    """Tokens of the encoder's longest input."""
    vocab_size: int
    """Ids of the input are below this."""
    decoder_prompt: tuple[int, ...]
    """The ids that every text of the decoder begins with: its start, and the forced first token if the model's files ask for one.
    They are no part of the answer."""


class PromptEncoder:
    """Checks prompts and tokenises texts for one model. Tokenising blocks and releases the GIL; any thread may do it."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, encoder: EncoderSettings | None = None) -> None:
        """`max_model_len`: tokens of prompt and answer together; with an `encoder`, which the prompt feeds, of the decoder's text.
        Turns off the tokenizer's truncation and padding, which some files have left over from training."""
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.encoder = encoder
        self.text_bound = TextBound(0)
        if tokenizer is not None:
            tokenizer.no_truncation()
            tokenizer.no_padding()
            self.text_bound = text_measure(tokenizer).bound(self._most_tokens)

    @property
    def _most_tokens(self) -> int:
        """Tokens of the longest prompt; without an encoder, an answer's first token included."""
        return self.max_model_len if self.encoder is None else self.encoder.max_tokens

    @property
    def max_ids(self) -> int:
        """Token ids of the longest prompt in a request, delivered tokens included."""
        return self.max_model_len if self.encoder is None else self.encoder.max_tokens + self.max_model_len

    def check_text(self, text: str) -> None:
        """EngineError if the text cannot be tokenised or is certainly too long. At most a millisecond per megabyte."""
        if self._tokenizer is None:
            raise invalid("prompt", "this model has no tokenizer: send token_ids")
        if (num_bytes := self.text_bound.excess(text)) is not None:
            takes = "for prompt and answer together" if self.encoder is None else "for the encoder"
            setting = "--max-model-len" if self.encoder is None else "--max-encoder-tokens"
            raise invalid(
                "prompt",
                f"the text has {num_bytes} bytes; at most {self.text_bound.max_bytes} can fit into the {self._most_tokens} "
                f"tokens that this worker takes {takes}; shorten the text, or start the workers with a larger {setting}",
            )

    def check_num_tokens(self, num_tokens: int, num_delivered: int = 0) -> None:
        """EngineError if a prompt of this length, of which the last tokens were delivered, is too long or leaves no room for an
        answer."""
        if self.encoder is None:
            self.check_text_begins(num_tokens)
            return
        num_delivered = min(num_delivered, num_tokens)
        self._check_input_length(num_tokens - num_delivered, self.encoder)
        self.check_text_begins(len(self.encoder.decoder_prompt) + num_delivered)

    def check_input(self, token_ids: Sequence[int]) -> None:
        """EngineError if the model has no encoder and gets an input for one, or has one and gets none, or ids out of range."""
        if self.encoder is None:
            if token_ids:
                raise invalid("prompt", "this model has no encoder, and was given an input for one")
            return
        if not token_ids:
            raise invalid("prompt", "needed at least one token for the encoder, got none")
        self._check_input_length(len(token_ids), self.encoder)
        if max(token_ids) >= self.encoder.vocab_size or min(token_ids) < 0:
            raise invalid(
                "prompt",
                f"token id {max(token_ids)} is outside the encoder's vocabulary of {self.encoder.vocab_size} tokens",
            )

    def _check_input_length(self, num_tokens: int, encoder: EncoderSettings) -> None:
        if num_tokens > encoder.max_tokens:
            raise invalid(
                "prompt",
                f"{num_tokens} tokens are more than the encoder takes on this worker, which is {encoder.max_tokens}: shorten the "
                "prompt, or start the workers with a larger --max-encoder-tokens if the model allows it",
            )

    def check_text_begins(self, num_tokens: int) -> None:
        """EngineError if a text that begins with so many tokens cannot go on."""
        if num_tokens >= self.max_model_len:
            raise invalid(
                "prompt",
                f"{num_tokens} tokens leave no room to generate: this worker takes {self.max_model_len} for "
                f"{'prompt and answer together' if self.encoder is None else 'the text of the decoder'}; shorten "
                "the prompt, or start the workers with a larger --max-model-len",
            )

    def split(self, token_ids: list[int], num_delivered: int) -> tuple[list[int], list[int]]:
        """A prompt, which ends with the delivered tokens, as the two parts of the model take it: the beginning of the text, which
        is the prompt, or what the decoder begins with and the delivered tokens; and the encoder's input, empty without one."""
        if self.encoder is None:
            return token_ids, []
        end = len(token_ids) - num_delivered
        return [*self.encoder.decoder_prompt, *token_ids[end:]], token_ids[:end]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds. EngineError if it is too long."""
        self.check_text(text)
        assert self._tokenizer is not None
        # Not encode(): it holds the GIL, which stops the event loop, and computes offsets that are not used.
        (encoding,) = self._tokenizer.encode_batch_fast([text])
        self.check_num_tokens(len(encoding))
        return list(encoding.ids)

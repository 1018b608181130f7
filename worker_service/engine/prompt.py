"""Prompts: checked for length first, then tokenised."""

from __future__ import annotations

from tokenizers import Tokenizer

from kvpool.protocol.text_bound import TextBound, text_bound

from .errors import invalid
from .split_prompt import EncoderSettings, SplitPrompt, split, too_long


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
            self.text_bound = text_bound(tokenizer, self._most_tokens)

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
        if num_tokens - num_delivered > self.encoder.max_tokens:
            raise invalid("prompt", too_long(num_tokens - num_delivered, self.encoder))
        self.check_text_begins(len(self.encoder.decoder_prompt) + num_delivered)

    def check_text_begins(self, num_tokens: int) -> None:
        """EngineError if a text that begins with so many tokens cannot go on."""
        if num_tokens >= self.max_model_len:
            raise invalid(
                "prompt",
                f"{num_tokens} tokens leave no room to generate: this worker takes {self.max_model_len} for "
                f"{'prompt and answer together' if self.encoder is None else 'the text of the decoder'}; shorten "
                "the prompt, or start the workers with a larger --max-model-len",
            )

    def split(self, token_ids: list[int], num_delivered: int) -> SplitPrompt:
        """A prompt, which ends with the delivered tokens, as the two parts of the model take it."""
        return split(token_ids, num_delivered, self.encoder)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds. EngineError if it is too long."""
        self.check_text(text)
        assert self._tokenizer is not None
        # Not encode(): it holds the GIL, which stops the event loop, and computes offsets that are not used.
        (encoding,) = self._tokenizer.encode_batch_fast([text])
        self.check_num_tokens(len(encoding))
        return list(encoding.ids)

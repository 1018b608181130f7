"""The facts, tokenizer and chat template of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final

from tokenizers import Tokenizer

from kvpool.protocol.sampling import sampling_fields
from kvpool.protocol.text_bound import MIN_SHORTENED_BYTES, SHORTENING_FACTOR, TextMeasure, text_measure
from kvpool.v1 import worker_pb2

from .chat_template import ChatTemplate
from .encoding import num_characters
from .errors import InvalidRequest, ProtocolError
from .messages import Message
from .prompt import EncoderModel, Prompt
from .template_process import TemplateProcess

_TOKENIZER: Final = worker_pb2.MODEL_FILE_TOKENIZER
_CHAT_TEMPLATE: Final = worker_pb2.MODEL_FILE_CHAT_TEMPLATE
_SPECIAL_TOKENS: Final = worker_pb2.MODEL_FILE_SPECIAL_TOKENS
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_UNCHECKED_FACTOR: Final = 4
"""How many times longer than the model's limit a text may be if it is only to be counted."""
_measured: Final = lru_cache(8)(text_measure)


@dataclass(frozen=True, slots=True)
class Model:
    """One model. Immutable; tokenising is blocking and may take milliseconds for long texts."""

    name: str
    """Name for people."""
    fingerprint: str
    """Digest of weights, KV dtype, RoPE and quantisation; part of the root."""
    architecture: str
    """The model_type of the model's config, e.g. "llama"."""
    dtype: str
    """Data type of weights and KV."""
    vocab_size: int
    """Number of token ids: each id is smaller."""
    max_model_len: int
    """Most tokens of prompt and answer together; with an encoder, of the decoder's text."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a text."""
    tokenizer: Tokenizer | None
    """None: the model folder has none; prompts must be token ids."""
    chat_template: ChatTemplate | None
    """None: the model folder has none; chat() is refused."""
    keeps_boundaries: bool = False
    """Whether layers have a sliding window or a state: then other prompts can continue only from boundaries."""
    encoder: EncoderModel | None = None
    """The encoder, which reads the prompt; None: the prompt is the beginning of the text."""
    end_of_turn_token_ids: tuple[int, ...] = ()
    """Ids that end a text too, in chats."""
    defaults: worker_pb2.GenerationDefaults = field(default_factory=worker_pb2.GenerationDefaults, repr=False)
    """Defaults of requests; `default_options` has them as options."""

    @property
    def default_options(self) -> dict[str, Any]:
        """The options of generate() to which the model's generation_config.json gives another default, with those defaults.
        `max_length` and `min_length` count the prompt too."""
        options: dict[str, Any] = sampling_fields(self.defaults.sampling)
        for part in (self.defaults.stop, self.defaults.beam_search, self.defaults):
            options |= {entry.name: value for entry, value in part.ListFields() if entry.message_type is None}
        if "stop_strings" in options:
            options["stop"] = list(options.pop("stop_strings"))
        if "early_stopping" in options:
            options["early_stopping"] = (False, True, "never")[options["early_stopping"]]
        del options["logit_bias"]
        # Numbers as the file has them: on the wire they are float32.
        return {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in options.items()}

    @classmethod
    def from_parts(
        cls, facts: worker_pb2.ModelFacts, files: Mapping[int, bytes], templates: TemplateProcess | None = None
    ) -> Model:
        """Build from a worker's facts and its files, already checked against their digests. `templates` renders the chat template;
        None: a process of its own."""
        tokenizer = None
        if _TOKENIZER in files:
            try:
                tokenizer = Tokenizer.from_str(files[_TOKENIZER].decode())
            except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot read
                raise ProtocolError(
                    f"the tokenizer of {facts.model_name} cannot be read: {error}", reason="BAD_MODEL_FILE"
                ) from error
            # A tokenizer.json may carry the cutting and padding of the last training run; prompts want neither.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        chat_template = None
        if _CHAT_TEMPLATE in files:
            special_tokens = _special_tokens(files.get(_SPECIAL_TOKENS, b"{}"), facts.model_name)
            source = files[_CHAT_TEMPLATE].decode(errors="replace")
            chat_template = ChatTemplate(source, special_tokens, process=templates)
        return cls(
            name=facts.model_name,
            fingerprint=facts.model_fingerprint,
            architecture=facts.architecture,
            dtype=facts.dtype,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            eos_token_ids=tuple(facts.eos_token_ids),
            tokenizer=tokenizer,
            chat_template=chat_template,
            keeps_boundaries=facts.keeps_boundaries,
            encoder=EncoderModel.of(facts),
            end_of_turn_token_ids=tuple(facts.end_of_turn_token_ids),
            defaults=facts.defaults,
        )

    def num_first_tokens(self, num_prompt_tokens: int) -> int:
        """Count the tokens that share `max_model_len` with an answer: the prompt's, or those that a decoder's text begins with."""
        return num_prompt_tokens if self.encoder is None else len(self.encoder.decoder_prompt)

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Tokenise a raw prompt, with the special tokens that the tokenizer itself adds. Token ids are only checked."""
        return self._checked(list(prompt) if not isinstance(prompt, str) else self._encode(prompt, special=True))

    def encode_text(self, text: str, *, special: bool = True) -> list[int]:
        """Tokenise a text, which may be empty, or longer than the model takes, but not many times longer. `special` includes the
        special tokens that the tokenizer itself adds."""
        return self._encode(text, special=special, is_checked=False)

    def encode_chat(
        self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None, *, check: bool = True
    ) -> list[int]:
        """Render and tokenise a chat up to where the assistant is to speak. Without `check` it may be longer than the model
        takes."""
        if self.encoder is not None:
            raise InvalidRequest(
                f"{self.name} does not chat: its prompt feeds an encoder, and is not the beginning of what it writes; use "
                "generate() with the text that the model was trained on",
                reason="NO_CHAT_TEMPLATE",
            )
        if self.chat_template is None:
            raise InvalidRequest(
                f"{self.name} has no chat template; use generate() with a prompt in the model's own form",
                reason="NO_CHAT_TEMPLATE",
            )
        self._require_renderable(messages)
        # The template writes the special tokens itself, a BOS among them: the tokenizer must not add a second one.
        text = self.chat_template.render(messages, arguments=arguments)
        ids = self._encode(text, special=False, is_checked=check)
        return self._checked(ids) if check else ids

    def chat_prompt(self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None) -> Prompt:
        """Return the prompt of a chat up to where the assistant is to speak. If boundaries matter, it has one at the end of the
        system prompt, with which other chats begin too."""
        token_ids = self.encode_chat(messages, arguments)
        boundaries = self._end_of_system_prompt(token_ids, messages, arguments)
        return Prompt(token_ids, boundaries, self.end_of_turn_token_ids)

    def _end_of_system_prompt(
        self, token_ids: list[int], messages: Sequence[Message], arguments: Mapping[str, Any] | None
    ) -> tuple[int, ...]:
        system = list(takewhile(lambda message: message["role"] in _SYSTEM_ROLES, messages))
        if not (self.keeps_boundaries and self.chat_template is not None and 0 < len(system) < len(messages)):
            return ()
        try:
            text = self.chat_template.render(system, add_generation_prompt=False, arguments=arguments)
        except InvalidRequest:
            return ()  # a template may refuse a chat in which nobody speaks
        same = takewhile(
            lambda pair: pair[0] == pair[1], zip(token_ids, self._encode(text, special=False), strict=False)
        )
        length = sum(1 for _ in same)
        return (length,) if length else ()

    def _encode(self, text: str, *, special: bool, is_checked: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequest(f"{self.name} has no tokenizer; pass the prompt as token ids", reason="NO_TOKENIZER")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the prompt is no valid text at character {error.start} ({text[error.start]!r}): its source is not UTF-8",
                reason="BAD_FIELD",
            ) from None
        self._require_fits(text, 1 if is_checked else _UNCHECKED_FACTOR)
        # For a single text too: encode() holds the GIL, and a long text would stop the caller's event loop.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return list(encoding.ids)

    @property
    def _most_tokens(self) -> int:
        """Most tokens that a prompt can have."""
        return self.max_model_len if self.encoder is None else self.encoder.max_tokens

    def _measure(self) -> TextMeasure | None:
        return None if self.tokenizer is None else _measured(self.tokenizer)

    def _require_fits(self, text: str, factor: int) -> None:
        """Raise InvalidRequest if the text certainly has more than `factor` times the tokens that the model takes. Costs at most a
        millisecond per megabyte, while tokenising would cost a hundred times its size in memory."""
        most = factor * self._most_tokens
        measure = self._measure() if len(text) > most else None
        if measure is None:
            return
        bound = measure.bound(most)
        if factor > 1:
            bound = bound._replace(max_bytes=max(bound.max_bytes, MIN_SHORTENED_BYTES))
        if (num_bytes := bound.excess(text)) is not None:
            raise InvalidRequest(
                f"the prompt has {num_bytes} bytes; at most {bound.max_bytes} can fit into {most} tokens, "
                f"{'which' if factor == 1 else f'{factor} times what'} {self.name} takes; shorten the prompt, or start the workers "
                f"with a larger {'--max-model-len' if self.encoder is None else '--max-encoder-tokens'}",
                reason="NEVER_FITS",
            )

    def _require_renderable(self, messages: Sequence[Message]) -> None:
        """Raise InvalidRequest if the messages are too long to be rendered. A template may leave out some of them."""
        count, measure = num_characters(messages), self._measure()
        if measure is None or count <= MIN_SHORTENED_BYTES:
            return
        most = max(MIN_SHORTENED_BYTES, SHORTENING_FACTOR * measure.bound(self._most_tokens).max_bytes)
        if count > most:
            raise InvalidRequest(
                f"the messages have {count} characters; at most {most} are rendered for the {self._most_tokens} tokens that "
                f"{self.name} takes; shorten them, or start the workers with a larger --max-model-len",
                reason="NEVER_FITS",
            )

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", reason="BAD_FIELD")
        if self.encoder is not None:
            return self._checked_input(ids, self.encoder)
        if len(ids) >= self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens; {self.name} takes {self.max_model_len} for prompt and answer "
                "together; shorten the prompt, or start the workers with a larger --max-model-len",
                reason="NEVER_FITS",
            )
        lowest, largest = min(ids), max(ids)
        if lowest < 0 or largest >= self.vocab_size:
            raise InvalidRequest(
                f"token id {lowest if lowest < 0 else largest} is outside 0 … {self.vocab_size - 1}, "
                f"the vocabulary of {self.name}",
                reason="BAD_FIELD",
            )
        return ids

    def _checked_input(self, ids: list[int], encoder: EncoderModel) -> list[int]:
        if len(ids) > encoder.max_tokens:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens; the encoder of {self.name} takes {encoder.max_tokens}; shorten the prompt, "
                "or start the workers with a larger --max-encoder-tokens",
                reason="NEVER_FITS",
            )
        # An encoder may have a vocabulary of its own, which its worker knows.
        wrong = next((token_id for token_id in ids if not 0 <= token_id < 2**32), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {wrong} is outside 0 … 2**32 − 1", reason="BAD_FIELD")
        return ids


def _special_tokens(content: bytes, model_name: str) -> dict[str, str]:
    try:
        tokens = json.loads(content)
    except ValueError as error:
        raise ProtocolError(
            f"the special tokens of {model_name} cannot be read: {error}", reason="BAD_MODEL_FILE"
        ) from error
    if not isinstance(tokens, dict):
        raise ProtocolError(f"the special tokens of {model_name} are not a JSON object", reason="BAD_MODEL_FILE")
    return {name: token for name, token in tokens.items() if isinstance(token, str)}

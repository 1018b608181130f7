"""What can be served at all: prompts and sampling options of the model's vocabulary, tokens and beams for which there is room."""

from __future__ import annotations

from itertools import chain

from ..cache.settings import CacheSettings
from .errors import invalid, never_fits
from .request import GenerationParams
from .settings import EngineSettings


class Capacity:
    def __init__(self, engine: EngineSettings, cache: CacheSettings) -> None:
        self._engine = engine
        self._cache = cache

    def max_tokens(self, params: GenerationParams) -> int:
        """How many tokens may be generated. EngineError if the request can never be served."""
        num_prompt = len(params.token_ids)
        if not num_prompt:
            raise invalid("prompt", "needed at least one token, got none")
        largest, vocab_size = max(params.token_ids), self._engine.vocab_size
        if largest >= vocab_size or min(params.token_ids) < 0:
            raise invalid("prompt", f"token id {largest} is outside the vocabulary of {vocab_size} tokens")
        room = self._engine.max_model_len - num_prompt
        if params.max_tokens > room:
            raise invalid(
                "max_tokens",
                f"{num_prompt} {_first(params)} and {params.max_tokens} new ones exceed this worker's limit of "
                f"{self._engine.max_model_len}; at most {room} can be generated",
            )
        num_beams = 1 if params.beams is None else params.beams.num_beams
        self._check_beams(num_beams)
        self._check_scratch(num_beams)
        max_tokens = params.max_tokens or self._tokens_that_fit(room, num_prompt, num_beams)
        self._check_blocks(params, max_tokens, num_beams)
        self._check_input(len(params.encoder_token_ids))
        return max_tokens

    def _check_input(self, num_encoder_tokens: int) -> None:
        num_blocks = -(-num_encoder_tokens // self._cache.block_size)
        if num_blocks > self._cache.encoder_capacity:
            raise never_fits(
                "prompt",
                f"{num_encoder_tokens} prompt tokens need {num_blocks} blocks of {self._cache.block_size} for the encoder's "
                f"output; this worker has {self._cache.encoder_capacity}: shorten the prompt, or give the worker more of them "
                "(--cross-blocks)",
            )

    def _check_beams(self, num_beams: int) -> None:
        most = self._engine.max_num_seqs
        if num_beams > most:
            raise invalid(
                "beam_search.num_beams",
                f"{num_beams} beams are computed together, and this worker's batch has {most} sequences: ask for fewer, or start "
                "the workers with a larger --max-num-seqs",
            )

    def _check_scratch(self, num_beams: int) -> None:
        """Raises EngineError if the beams do not fit into a group where they share nothing."""
        for index, group in enumerate(self._cache.groups if num_beams > 1 else ()):
            needed = group.num_for_beams(self._cache.sizes, num_beams)
            if needed > group.num_blocks - 1:
                raise never_fits(
                    "beam_search.num_beams",
                    f"{num_beams} beams need {needed} blocks of group {index} ({group}); this worker has {group.num_blocks - 1}: "
                    "ask for fewer beams, or give the worker more blocks (--max-num-seqs, --kv-cache-memory)",
                )

    def _tokens_that_fit(self, room: int, num_prompt: int, num_beams: int) -> int:
        """The largest number of new tokens, by the model's limit and the pools'."""
        size, capacity = self._cache.block_size, self._cache.capacity
        num_shared = num_prompt // size if num_beams > 1 else 0
        num_blocks = num_shared + (capacity - num_shared) // num_beams
        return max(1, min(room, num_blocks * size - num_prompt + 1))

    def _check_blocks(self, params: GenerationParams, max_tokens: int, num_beams: int) -> None:
        """Beams share the full blocks of the prompt, and each may need all of the rest. Answers that are sampled need not fit
        together: each is preempted by itself."""
        size, capacity, num_prompt = self._cache.block_size, self._cache.capacity, len(params.token_ids)
        num_blocks = -(-(num_prompt + max_tokens - 1) // size)
        who, change = "", "lower max_tokens"
        if num_beams > 1:
            num_shared = num_prompt // size
            num_blocks = num_shared + num_beams * (num_blocks - num_shared)
            who, change = f" of each of {num_beams} beams", "lower max_tokens, ask for fewer beams"
        if num_blocks > capacity:
            raise never_fits(
                "max_tokens",
                f"{num_prompt} {_first(params)} and {max_tokens} new ones{who} need {num_blocks} blocks of {size}; this worker "
                f"has {capacity}: {change}, or give the worker more blocks (--num-blocks, --kv-cache-memory)",
            )


def _first(params: GenerationParams) -> str:
    """What a text begins with, for messages."""
    return "tokens at the beginning of the decoder's text" if params.encoder_token_ids else "prompt tokens"


def check_sampling(
    params: GenerationParams, *, vocab_size: int, ending_ids: frozenset[int], has_tokenizer: bool
) -> None:
    """EngineError naming the field that is wrong. `ending_ids`: all ids that end this request's text."""
    if params.stop_strings and not has_tokenizer:
        raise invalid("stop.stop_strings", "this model has no tokenizer, so there is no text to find them in")
    if params.echo and not has_tokenizer:
        raise invalid("echo", "this model has no tokenizer, so the prompt has no text")
    for field, token_ids in (
        ("sampling.logit_bias", params.sampling.logit_bias),
        ("stop.stop_token_ids", params.stop_token_ids),
        ("sampling.suppress_tokens", params.sampling.suppress_tokens),
        ("sampling.begin_suppress_tokens", params.sampling.begin_suppress_tokens),
        ("sampling.bad_words_ids", chain.from_iterable(params.sampling.bad_words_ids)),
        ("sampling.forced_eos_token_id", params.sampling.forced_eos_token_id),
    ):
        outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if outside:
            raise invalid(field, f"token id {min(outside)} is outside the vocabulary of {vocab_size} tokens")
    _check_min_tokens(params, vocab_size, ending_ids)


def _check_min_tokens(params: GenerationParams, vocab_size: int, ending_ids: frozenset[int]) -> None:
    if not params.min_tokens:
        return
    most = params.num_delivered_tokens + params.max_tokens
    if params.max_tokens and params.min_tokens > most:
        raise invalid(
            "stop.min_tokens", f"{params.min_tokens} tokens are more than the {most} that may be generated (max_tokens)"
        )
    if sum(token_id < vocab_size for token_id in ending_ids) >= vocab_size:
        raise invalid(
            "stop.min_tokens",
            f"all {vocab_size} tokens of the vocabulary end the text, so none can be drawn before it may end; "
            "give fewer stop_token_ids",
        )

"""Checks of a request's sampling options that depend on the model; the codec has checked the rest."""

from __future__ import annotations

from itertools import chain

from .errors import invalid
from .request import GenerationParams


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

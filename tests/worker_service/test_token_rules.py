"""Ids that must not, or must, follow: those of transformers' processors, along every fork of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor

from kvpool.worker_service.engine.token_rules import NextIds, TokenRules
from kvpool.worker_service.step import SamplingParams

VOCAB_SIZE = 6
"""Few, so that runs come again."""
MAX_NEW = 8
ids = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def rules(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        no_repeat_ngram_size=draw(st.integers(0, 4)),
        encoder_no_repeat_ngram_size=draw(st.integers(0, 4)),
        bad_words_ids=tuple(draw(st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=3))),
        suppress_tokens=tuple(draw(st.lists(ids, max_size=1))),
        begin_suppress_tokens=tuple(draw(st.lists(ids, max_size=2))),
        forced_eos_token_id=tuple(draw(st.lists(ids, max_size=2, unique=True))),
    )


def oracle(
    sampling: SamplingParams, prompt: Sequence[int], source: Sequence[int], ends: list[int], min_tokens: int
) -> LogitsProcessorList:
    """In the order of generate."""
    found = LogitsProcessorList()
    if size := sampling.no_repeat_ngram_size:
        found.append(NoRepeatNGramLogitsProcessor(size))
    if size := sampling.encoder_no_repeat_ngram_size:
        found.append(EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([source])))
    words = [list(word) for word in dict.fromkeys(sampling.bad_words_ids)]
    if any(word not in [[end] for end in ends] for word in words):  # it refuses to have none left
        found.append(NoBadWordsLogitsProcessor(words, ends))
    if min_tokens:
        found.append(MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, ends))
    if sampling.forced_eos_token_id:
        found.append(ForcedEOSTokenLogitsProcessor(len(prompt) + MAX_NEW, list(sampling.forced_eos_token_id)))
    found.append(SuppressTokensLogitsProcessor(list(sampling.suppress_tokens)))
    found.append(SuppressTokensAtBeginLogitsProcessor(list(sampling.begin_suppress_tokens), len(prompt)))
    return found


def possible(following: NextIds) -> set[int]:
    return set(following.forced or range(VOCAB_SIZE)) - set(following.banned)


@given(
    sampling=rules(),
    prompt=st.lists(ids, min_size=1, max_size=8),
    encoder=st.none() | st.lists(ids, min_size=1, max_size=8),
    ends=st.lists(ids, min_size=1, max_size=2, unique=True),
    min_tokens=st.integers(0, 4),
    branches=st.lists(st.tuples(st.integers(0, MAX_NEW), st.lists(ids, max_size=MAX_NEW)), min_size=1, max_size=3),
)
@settings(max_examples=150)
def test_what_may_follow_is_what_the_processors_leave(
    sampling: SamplingParams,
    prompt: list[int],
    encoder: list[int] | None,
    ends: list[int],
    min_tokens: int,
    branches: list[tuple[int, list[int]]],
) -> None:
    """Each branch leaves the one before at some token, and goes on by itself; each is also begun anew where it left, as a
    continuation is, and both know the same."""
    source = encoder or prompt
    processors = oracle(sampling, prompt, source, ends, min_tokens)
    text: list[int] = []
    states = [TokenRules(sampling, prompt, source, ends)]
    for left_at, more in branches:
        left_at = min(left_at, len(text))
        text = [*text[:left_at], *more][:MAX_NEW]
        states = [state.copy() for state in states[: left_at + 1]]
        anew = TokenRules(sampling, [*prompt, *text[:left_at]], source, ends)
        for place in range(left_at, len(text) + 1):
            tokens = [*prompt, *text[:place]]
            if place < MAX_NEW:
                is_last, may_end = place == MAX_NEW - 1, place >= min_tokens
                following = states[-1].next(tokens, is_first=not place, is_last=is_last, may_end=may_end)
                scores = processors(torch.tensor([tokens]), torch.zeros(1, VOCAB_SIZE))[0].tolist()
                assert possible(following) == {one for one, score in enumerate(scores) if score > -math.inf}
                assert anew.next(tokens, is_first=not place, is_last=is_last, may_end=may_end) == following
            if place < len(text):
                states.append(states[-1].copy())
                states[-1].add(text[place])
                anew.add(text[place])

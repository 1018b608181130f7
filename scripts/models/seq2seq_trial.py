"""The trial of an encoder-decoder type: whether it is refused, and if not, whether it equals transformers' generate over the
paged KV."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.guard.tiny_replica import NUM_PLAIN_TOKENS, replica_config, replica_length
from kvpool.worker_service.model.length import choose_max_encoder_tokens
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.step import SamplingParams
from tests.model.paged import PagedModel, Request, load
from tests.tiny_models import Oracle

from .outcome import Outcome, Result
from .trial import (
    FIRST_PLAIN,
    MIN_EFFECT,
    MIN_MARGIN,
    NUM_NEW,
    SEEDS,
    WAYS,
    Meaningless,
    Truth,
    difference_of,
    longest,
    refusal_of,
    save,
    shown,
)

_INPUT_LENGTHS = (5, 19, 41)
"""Tokens of the encoder's inputs; the second one has two texts."""
_PROMPT_LENGTHS = (1, 1, 11, 6)
"""Tokens of the decoder's prompts, with its start token."""
_OF_INPUT = (0, 1, 2, 1)
"""The input of each text. The last one finds its KV in the blocks."""


class _Truths(NamedTuple):
    inputs: list[list[int]]
    """Of the encoder."""
    texts: list[Truth]


def try_seq2seq(kind: str, config: Any, folder: Path) -> Outcome:
    """Try one type, with the config of an encoder-decoder model; see trial.try_type."""
    length = longest(config)
    if (refusal := refusal_of(config, length)) is not None:
        return Outcome(kind, Result.REFUSED, refusal)
    # Such that all thresholds are within the texts and the inputs.
    length = max(length, choose_max_encoder_tokens(config, length))
    try:
        save(replica_config(config, length), folder)
    except Exception as error:
        return Outcome(kind, Result.NOT_BUILT, shown(error))
    try:
        loaded = load(folder, max_model_len=replica_length(config, length))
    except ModelError as error:
        # Its full-size config was accepted, so the checks disagree.
        return Outcome(kind, Result.WRONG, f"refused only when loaded: {error}")
    return _compare(kind, folder, loaded)


def _compare(kind: str, folder: Path, loaded: LoadedModel) -> Outcome:
    remark, wrong = "", None
    try:
        wrong = _first_difference(loaded, _truths(folder, loaded))
        if wrong is None:
            return Outcome(kind, Result.RUNS)
        remark = "equals generate without a cache; with one, generate differs"
    except Meaningless as error:
        return Outcome(kind, Result.NOT_BUILT, str(error))
    except Exception as error:
        remark = f"equals generate without a cache; with one, generate fails: {shown(error)}"
    try:
        uncached = _truths(folder, loaded, use_cache=False)
    except Exception as error:
        return Outcome(kind, Result.NOT_BUILT, f"transformers' own generate fails: {shown(error)}")
    if (unlike := _first_difference(loaded, uncached)) is not None:
        return Outcome(kind, Result.WRONG, wrong or unlike)
    return Outcome(kind, Result.RUNS, remark)


def _first_difference(loaded: LoadedModel, truths: _Truths) -> str | None:
    try:
        return next((wrong for way in WAYS if (wrong := _difference(loaded, truths, *way))), None)
    except Exception as error:
        return f"fails over paged KV: {shown(error)}"


def _truths(folder: Path, loaded: LoadedModel, use_cache: bool = True) -> _Truths:
    """The oracle's answers to inputs for which they do not depend on rounding."""
    oracle = Oracle.of(folder, use_cache)
    assert loaded.encoder is not None
    start, limit = loaded.encoder.decoder_prompt[0], loaded.encoder.max_tokens
    for seed in SEEDS:
        numbers = random.Random(seed)
        inputs = [_tokens(numbers, min(length, limit)) for length in _INPUT_LENGTHS]
        prompts = [[start, *_tokens(numbers, length - 1)] for length in _PROMPT_LENGTHS]
        given = [(inputs[index], prompt) for index, prompt in zip(_OF_INPUT, prompts, strict=True)]
        answers = [oracle.logits(tokens, NUM_NEW, prompt) for tokens, prompt in given]
        margins = [logits.topk(2, dim=-1).values.diff(dim=-1).abs().min() / logits.std() for _, logits in answers]
        if all(float(margin) >= MIN_MARGIN for margin in margins):
            break
    else:
        raise Meaningless("its greedy tokens always depend on rounding")
    longest_prompt = prompts[2]
    _check_effect(oracle, inputs[2], longest_prompt, answers[2][1])
    texts = [
        Truth(prompt, tokens, torch.log_softmax(logits.float(), dim=-1), float(logits.std()))
        for prompt, (tokens, logits) in zip(prompts, answers, strict=True)
    ]
    return _Truths(inputs, texts)


def _tokens(numbers: random.Random, length: int) -> list[int]:
    return [numbers.randrange(FIRST_PLAIN, NUM_PLAIN_TOKENS) for _ in range(length)]


def _check_effect(oracle: Oracle, tokens: list[int], prompt: list[int], logits: torch.Tensor) -> None:
    """Another order of the encoder's input, or of the decoder's prompt, must change the next logits."""
    for other, text in ((tokens[::-1], prompt), (tokens, [prompt[0], *prompt[-2:0:-1], prompt[-1]])):
        _, changed = oracle.logits(other, 1, text)
        if float((changed[0] - logits[0]).abs().max() / logits.std()) < MIN_EFFECT:
            raise Meaningless("its logits hardly depend on earlier tokens")


def _difference(loaded: LoadedModel, truths: _Truths, chunk: int, stagger: int) -> str | None:
    """Run all texts at once over the paged KV; returns the first difference from the truth, if any."""
    paged = PagedModel(loaded)
    everything = SamplingParams(num_logprobs=truths.texts[0].logprobs.shape[-1])
    encoders = [paged.encoder(tokens) for tokens in truths.inputs]
    requests: list[Request] = []
    for place, (index, truth) in enumerate(zip(_OF_INPUT, truths.texts, strict=True)):
        is_known = index in _OF_INPUT[:place]
        encoder = encoders[index]._replace(token_ids=()) if is_known else encoders[index]
        requests.append(paged.request(truth.prompt, NUM_NEW, sampling=everything, encoder=encoder))
    paged.run(requests, chunk, stagger)
    paged.runner.close()
    for index, request, truth in zip(_OF_INPUT, requests, truths.texts, strict=True):
        difference = difference_of(request.sampled, truth)
        if difference is not None:
            lengths = f"input of {len(truths.inputs[index])} tokens, prompt of {len(truth.prompt)}"
            return f"chunks of {chunk}, {lengths}: {difference}"
    return None

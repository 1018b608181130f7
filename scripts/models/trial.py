"""The trial of a type: whether it is refused, and if not, whether it equals transformers' generate over the paged KV."""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING

from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.guard.support import check_config, check_replica
from kvpool.worker_service.model.guard.tiny_replica import (
    NUM_PLAIN_TOKENS,
    THRESHOLD,
    build_replica,
    replica_config,
    replica_length,
)
from kvpool.worker_service.model.language_model import attention_of, build_language_model
from kvpool.worker_service.model.length import choose_max_model_len, fix_longrope, is_encoder_decoder, longest_exact
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.step import SampledToken, SamplingParams
from tests.model.paged import BLOCK_SIZE, NEVER, PagedModel, Request, load
from tests.tiny_models import Oracle

from .outcome import NATIVE, Outcome, Result
from .published import PUBLISHED, scaled_config
from .subjects import default_config

TOLERANCE = 1e-3
"""Largest difference of a log-probability in float32, as a share of the logits' standard deviation."""
MIN_MARGIN = 1e-3
"""Least distance of the oracle's two best logits at every step, the same share; else equal tokens could be chance."""
MIN_EFFECT = 0.02
"""Least effect of an earlier token on a logit, the same share; else equal logits prove nothing about attention."""
NUM_NEW = 12
_PROMPT_LENGTHS = (5, 19, 41)
FIRST_PLAIN = 16
SEEDS = range(8)
_ENDLESS = 1 << 20
"""Tokens; longer than all lengths in configs."""
# Whole prompts; in chunks; in chunks and joining one after the other, so that prefill is mixed with decode.
WAYS = ((NEVER, 0), (7, 0), (3, 2))


class Truth(NamedTuple):
    """generate's answer to a prompt."""

    prompt: list[int]
    """With an encoder: the decoder's."""
    tokens: list[int]
    logprobs: torch.Tensor
    """[num_new, vocab_size]"""
    scale: float
    """Standard deviation of the logits."""


class Meaningless(Exception):
    """A comparison with this tiny model would prove nothing."""


def try_type(kind: str, folder: Path) -> Outcome:
    """Try one type; `folder` is for its files. Does not raise errors of the model."""
    started = time.monotonic()
    outcome = _try(kind, folder)
    return replace(outcome, seconds=time.monotonic() - started)


def _try(kind: str, folder: Path) -> Outcome:
    try:
        config = default_config(kind)
    except Exception as error:
        return Outcome(kind, Result.NOT_BUILT, shown(error))
    if is_encoder_decoder(config):
        from .seq2seq_trial import try_seq2seq

        return try_seq2seq(kind, config, folder)
    refusal = refusal_of(config, longest(config))
    limit = None if refusal is None else _length_named(refusal)
    if refusal is not None and (limit is None or limit < 2):
        missing = re.search(r"ImportError: (.*)$", refusal)
        return Outcome(kind, Result.NOT_BUILT, missing[1]) if missing else Outcome(kind, Result.REFUSED, refusal)
    if limit is not None and (again := refusal_of(config, limit)) is not None:
        return Outcome(kind, Result.WRONG, f"its message recommends --max-model-len {limit}, which is refused: {again}")
    # Such that all thresholds are within the prompts, unless texts that long would be refused.
    length = limit or longest_exact(config) or (_ENDLESS if refusal_of(config, _ENDLESS) is None else longest(config))
    try:
        scaled = scaled_config(kind) if kind.startswith(PUBLISHED) else None
        save(scaled or replica_config(config, length), folder)
    except Exception as error:
        return Outcome(kind, Result.NOT_BUILT, shown(error))
    return _compare(kind, folder, replica_length(config, length), limit or longest_exact(config))


def _build_whole_model(config: Any, attn_implementation: str, **options: Any) -> Any:
    """The model with random weights, and with the parts that read anything but text if transformers has a class with them."""
    whole = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if whole is None:
        return build_language_model(config, attn_implementation, **options)
    return whole._from_config(config, attn_implementation=attention_of(config, attn_implementation), **options)


def save(config: Any, folder: Path, seed: int = 0) -> None:
    """Save a random model of the config as a folder of safetensors. Its files force no end, which BART's config does."""
    model = build_replica(config, seed, _build_whole_model)
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    config.save_pretrained(folder)  # some composite models save only their text's config


def longest(config: Any) -> int:
    try:
        return choose_max_model_len(config, None)
    except ModelError:  # the config has none
        return _ENDLESS


def refusal_of(config: Any, max_model_len: int) -> str | None:
    """load_model's refusal of a full-size model of this config, before it reads weights; None if it accepts it."""
    config = copy.deepcopy(config)
    fix_longrope(config, max_model_len)
    try:
        check_config(config, max_model_len)
        check_replica(config, max_model_len)
    except ModelError as error:
        return " ".join(str(error).split())
    return None


def _length_named(refusal: str) -> int | None:
    found = re.search(r"--max-model-len (\d+)", refusal)
    return int(found[1]) if found else None


def _compare(kind: str, folder: Path, max_model_len: int, limit: int | None) -> Outcome:
    try:
        loaded = load(folder, max_model_len=max_model_len)
    except ModelError as error:
        # Its full-size config was accepted, so the checks disagree.
        return Outcome(kind, Result.WRONG, f"refused only when loaded: {error}")
    limited = f"up to {limit} tokens" if limit else ""
    remark, wrong = "", None
    try:
        truths = _truths(folder, loaded)
        wrong = _first_difference(loaded, truths)
        if wrong is None:
            return _natively(Outcome(kind, Result.RUNS, limited), folder, max_model_len, truths)
        remark = "equals generate without a cache; with one, generate differs"
    except Meaningless as error:
        return Outcome(kind, Result.NOT_BUILT, str(error))
    except Exception as error:
        remark = f"equals generate without a cache; with one, generate fails: {shown(error)}"
    # Each type has its own cache code; the truth is the result without a cache.
    try:
        uncached = _truths(folder, loaded, use_cache=False)
    except Exception as error:
        return Outcome(kind, Result.NOT_BUILT, f"transformers' own generate fails: {shown(error)}")
    if (unlike := _first_difference(loaded, uncached)) is not None:
        return Outcome(kind, Result.WRONG, wrong or unlike)
    return _natively(
        Outcome(kind, Result.RUNS, "; ".join(filter(None, (limited, remark)))), folder, max_model_len, uncached
    )


def _natively(outcome: Outcome, folder: Path, max_model_len: int, truths: list[Truth]) -> Outcome:
    """The outcome of a type that runs, with what the native step makes of it: the same, or a reason."""
    try:
        loaded = load(folder, max_model_len=max_model_len, runtime="native")
    except ModelError as error:
        reason = str(error).removeprefix("--runtime native cannot serve this model here: ")
        return replace(outcome, native=reason.removesuffix(". Give --runtime auto or torch."))
    if (wrong := _first_difference(loaded, truths)) is not None:
        return Outcome(outcome.kind, Result.WRONG, f"natively: {wrong}")
    return replace(outcome, native=NATIVE)


def _first_difference(loaded: LoadedModel, truths: list[Truth]) -> str | None:
    try:
        return next((wrong for way in WAYS if (wrong := _difference(loaded, truths, *way))), None)
    except Exception as error:
        return f"fails over paged KV: {shown(error)}"


def _truths(folder: Path, loaded: LoadedModel, use_cache: bool = True) -> list[Truth]:
    """The oracle's answers to prompts for which they do not depend on rounding."""
    oracle = Oracle.of(folder, use_cache)
    why = "its greedy tokens always depend on rounding"
    for seed in SEEDS:
        numbers = random.Random(seed)
        lengths = [min(length, loaded.facts.max_model_len - NUM_NEW) for length in _PROMPT_LENGTHS]
        prompts = [[numbers.randrange(FIRST_PLAIN, NUM_PLAIN_TOKENS) for _ in range(length)] for length in lengths]
        answers = [oracle.logits(tuple(prompt), NUM_NEW) for prompt in prompts]
        margins = [logits.topk(2, dim=-1).values.diff(dim=-1).abs().min() / logits.std() for _, logits in answers]
        if all(float(margin) >= MIN_MARGIN for margin in margins):
            if _effect(oracle, prompts[-1], answers[-1][1]) >= MIN_EFFECT:
                break
            why = "its logits hardly depend on earlier tokens"
    else:
        raise Meaningless(why)
    return [
        Truth(prompt, tokens, torch.log_softmax(logits.float(), dim=-1), float(logits.std()))
        for prompt, (tokens, logits) in zip(prompts, answers, strict=True)
    ]


def _effect(oracle: Oracle, prompt: list[int], logits: torch.Tensor) -> float:
    """Of other tokens shortly before the end of the prompt on the next logits: the largest, as a share of their deviation."""
    other = list(prompt)
    other[-THRESHOLD:-1] = reversed(other[-THRESHOLD:-1])
    _, changed = oracle.logits(tuple(other), 1)
    return float((changed[0] - logits[0]).abs().max() / logits.std())


def _difference(loaded: LoadedModel, truths: list[Truth], chunk: int, stagger: int) -> str | None:
    """Run all prompts at once over the paged KV; returns the first difference from the truth, if any. With recurrent layers, once
    more from states that were kept on the way, and computed again from the beginning with the tokens that were generated."""
    paged = PagedModel(loaded)
    everything = SamplingParams(num_logprobs=truths[0].logprobs.shape[-1])
    requests = [paged.request(truth.prompt, NUM_NEW, sampling=everything) for truth in truths]
    if loaded.runtime.mixers:
        for request in requests:
            request.snapshots[_kept_at(request)] = paged.state_block()
    way = f"chunks of {chunk}" if chunk != NEVER else "whole prompts"
    try:
        paged.run(requests, chunk, stagger)
        wrong = _unlike(requests, truths, way)
        if wrong is not None or not loaded.runtime.mixers:
            return wrong
        hits = [
            paged.request(
                request.prompt,
                NUM_NEW,
                request.table[: _kept_at(request) // BLOCK_SIZE],
                everything,
                source=request.snapshots[_kept_at(request)],
            )
            for request in requests
        ]
        paged.run(hits, chunk, stagger)
        if (wrong := _unlike(hits, truths, f"{way}, from a state that was kept")) is not None:
            return wrong
        for request in requests:
            request.sampled = request.sampled[: NUM_NEW // 2]
        paged.run(requests, chunk, stagger)
        return _unlike(requests, truths, f"{way}, computed again")
    finally:
        paged.runner.close()


def _kept_at(request: Request) -> int:
    """Tokens of a prompt after which its state is kept: a multiple of the block, with tokens after it."""
    return max(BLOCK_SIZE, len(request.prompt) // 2 // BLOCK_SIZE * BLOCK_SIZE)


def _unlike(requests: Sequence[Request], truths: Sequence[Truth], way: str) -> str | None:
    """The first difference from the truth, if any."""
    for request, truth in zip(requests, truths, strict=True):
        difference = difference_of(request.sampled, truth)
        if difference is not None:
            return f"{way}, prompt of {len(truth.prompt)} tokens: {difference}"
    return None


def difference_of(found: Sequence[SampledToken], truth: Truth) -> str | None:
    """Between a text, with the log-probabilities of the whole vocabulary, and the truth."""
    token_ids = [sampled.token_id for sampled in found]
    if token_ids != truth.tokens:
        return f"tokens {token_ids}, generate has {truth.tokens}"
    for index, sampled in enumerate(found):
        assert sampled.logprobs is not None
        ours = torch.full_like(truth.logprobs[index], float("nan"))
        for token, logprob in sampled.logprobs.top:
            ours[token] = logprob
        difference = float((ours - truth.logprobs[index]).abs().max()) / truth.scale
        if not difference <= TOLERANCE:
            return f"log-probabilities of token {index} differ by {difference:.2g} standard deviations"
    return None


def shown(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())

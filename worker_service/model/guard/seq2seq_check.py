"""The check of an encoder-decoder model before it is served: its decoder over paged KV must compute what eager attention does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...attention.torch_backend import TorchAttention
from ...step import EncoderBlocks
from ..errors import UnsupportedModel
from ..forward.encoder_decoder import EncoderDecoderRuntime
from ..forward.invariant import replacing
from ..forward.seq2seq import Seq2Seq, find_decoder_layers, fix_positions
from .self_check import (
    FEW_TOKENS,
    LENGTHS,
    STEPS,
    eager,
    logits_of_texts,
    paged_runner,
    probing,
    random_sequences,
    relative_difference,
    require_equal,
    scattered_tables,
)

_BLOCK_SIZE = 4
_ENCODER_LENGTHS = (11, 26, 3, 26)
"""Tokens of the encoder's inputs of these texts."""
_SHARED = (1, 3)
"""Two texts with one input of the encoder: the second one finds its KV in the blocks."""
_WATCHED_TOKENS = 7
_SAME = 1e-5
"""Largest relative difference of two runs of one encoder on one input."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts of the decoder to compute, each over an input of the encoder."""

    texts: list[list[int]]
    inputs: list[list[int]]
    finds: dict[int, int]
    """Index of a text whose input is computed with an earlier text → index of that text."""


def guarded_encoder_decoder(
    model: Any,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_encoder_tokens: int,
    is_thorough: bool,
) -> EncoderDecoderRuntime:
    """The runtime of an encoder-decoder model; arguments and errors as of `guarded`, which calls it."""
    with probing(model):
        seq2seq = Seq2Seq(model)
        if is_thorough:  # before its encoder has seen anything
            _require_lasting_encoder(seq2seq, max_encoder_tokens, device)
        with replacing(model, dtype, device):
            layers = find_decoder_layers(seq2seq, device)
        layers = fix_positions(seq2seq, layers, _two_texts(config, device), max_model_len)
        runtime = EncoderDecoderRuntime(model.config, layers, dtype, device, (), model, seq2seq)
        few = _few_texts(seq2seq, max_model_len, max_encoder_tokens, is_thorough)
        _compare(runtime, few, STEPS, "packed and in chunks")
        if is_thorough:
            longest = _longest_texts(seq2seq, max_model_len, max_encoder_tokens)
            _compare(runtime, *longest, "at the longest texts, two in a row")
    return runtime


def _two_texts(config: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts [1, T] without a common token, for find_position_tables."""
    (tokens,) = random_sequences(config, [8 * _WATCHED_TOKENS])
    distinct = list(dict.fromkeys(tokens))[: 2 * _WATCHED_TOKENS]
    first, second = distinct[:_WATCHED_TOKENS], distinct[_WATCHED_TOKENS:]
    return torch.tensor([first], device=device), torch.tensor([second], device=device)


def _few_texts(seq2seq: Seq2Seq, max_model_len: int, max_encoder_tokens: int, is_thorough: bool) -> _Texts:
    lengths = [min(length, max_model_len) for length in (LENGTHS if is_thorough else FEW_TOKENS)]
    texts = random_sequences(seq2seq.model.config, lengths)
    inputs = _inputs(seq2seq, [min(length, max_encoder_tokens) for length in _ENCODER_LENGTHS[: len(texts)]])
    brings, finds = _SHARED
    if finds >= len(texts):
        return _Texts(texts, inputs, {})
    inputs[finds] = inputs[brings]
    return _Texts(texts, inputs, {finds: brings})


def _longest_texts(
    seq2seq: Seq2Seq, max_model_len: int, max_encoder_tokens: int
) -> tuple[_Texts, Sequence[Sequence[tuple[int, int, int]]]]:
    """Two of the longest texts: their first chunks make a row longer than any text, their last ones are far from the beginning."""
    texts = random_sequences(seq2seq.model.config, [max_model_len, max_model_len], seed=1)
    cut = max(1, max_model_len * 3 // 4)
    steps = (((0, 0, cut), (1, 0, cut)), ((1, cut, max_model_len), (0, cut, max_model_len)))
    return _Texts(texts, _inputs(seq2seq, [max_encoder_tokens, 2], seed=1), {}), steps


def _inputs(seq2seq: Seq2Seq, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    return random_sequences(seq2seq.model.config, lengths, seed + 100, seq2seq.num_encoder_ids)


def _require_lasting_encoder(seq2seq: Seq2Seq, max_encoder_tokens: int, device: torch.device) -> None:
    """The same input must have the same output again. Raises UnsupportedModel."""
    inputs = _inputs(seq2seq, [max_encoder_tokens, min(5, max_encoder_tokens)])
    long, short = (torch.tensor([tokens], device=device) for tokens in inputs)
    with torch.inference_mode():
        first, _, last = (seq2seq.encode(tokens)[0][0] for tokens in (long, short, long))
    if not relative_difference(last, first) <= _SAME:
        raise UnsupportedModel(
            f"{type(seq2seq.model).__name__} encodes an input in another way after it has seen a shorter one, so equal requests "
            "would have different answers."
        )


def _compare(
    runtime: EncoderDecoderRuntime, texts: _Texts, steps: Sequence[Sequence[tuple[int, int, int]]], where: str
) -> None:
    """Compute the texts over paged KV in steps, and each alone in eager attention. Raises UnsupportedModel if they differ by more
    than rounding."""
    tables = scattered_tables(len(texts.inputs), max(map(len, texts.inputs)), _BLOCK_SIZE)
    encoders = [EncoderBlocks(table, len(tokens), tokens) for table, tokens in zip(tables, texts.inputs, strict=True)]
    for later, earlier in texts.finds.items():
        encoders[later] = encoders[earlier]._replace(token_ids=())
    longest, backend = max(map(len, texts.texts)), TorchAttention(runtime.dtype)
    with paged_runner(runtime, backend, len(texts.texts), longest, _BLOCK_SIZE, encoders) as (runner, of_texts):
        paged = logits_of_texts(runner, texts.texts, of_texts, steps, encoders)
    for ours, text, tokens in zip(paged, texts.texts, texts.inputs, strict=True):
        why = "takes its positions from elsewhere, has a mask of its own, or keeps a state"
        require_equal(runtime, ours, _eager_logits(runtime, text, tokens), where, why)


def _eager_logits(runtime: EncoderDecoderRuntime, text: list[int], tokens: list[int]) -> torch.Tensor:
    """The logits [T, vocab_size] of a whole text in transformers' own attention, with its own positions."""
    with eager(runtime.model):
        input_ids, decoder_ids = (torch.tensor([ids], device=runtime.device) for ids in (tokens, text))
        # Masks as in generate: without one, some models hide tokens with the id of the padding.
        logits: torch.Tensor = runtime.model(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            decoder_input_ids=decoder_ids,
            decoder_attention_mask=torch.ones_like(decoder_ids),
            use_cache=False,
        ).logits[0]
    return logits

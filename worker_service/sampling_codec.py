"""Conversion of sampling options from messages to the engine's types. Pure; checks every limit of the protos."""

from __future__ import annotations

import math

from kvpool.v1 import worker_pb2

from .engine.errors import invalid
from .engine.sampling_params import SamplingParams

MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024


def decode_sampling(request: worker_pb2.GenerateRequest) -> SamplingParams:
    """The sampling parameters of a request. Raises EngineError naming the field that is wrong."""
    sampling = request.sampling
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise invalid("sampling.top_p", f"needed more than 0 and at most 1, got {top_p:g}")
    penalty = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    if not 0 < penalty <= MAX_REPETITION_PENALTY:
        raise invalid(
            "sampling.repetition_penalty", f"needed more than 0 and at most {MAX_REPETITION_PENALTY:g}, got {penalty:g}"
        )
    return SamplingParams(
        temperature=_within("sampling.temperature", sampling.temperature, 0, MAX_TEMPERATURE),
        top_k=sampling.top_k,
        top_p=top_p,
        min_p=_within("sampling.min_p", sampling.min_p, 0, 1),
        seed=sampling.seed,
        repetition_penalty=penalty,
        presence_penalty=_within("sampling.presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_within("sampling.frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_logit_bias(sampling),
        num_logprobs=_num_logprobs("logprobs", request.logprobs if request.HasField("logprobs") else None),
    )


def decode_prompt_logprobs(request: worker_pb2.GenerateRequest) -> int | None:
    """Number of most likely tokens at each position of the prompt; None: no log-probabilities of it."""
    wanted = request.prompt_logprobs if request.HasField("prompt_logprobs") else None
    return _num_logprobs("prompt_logprobs", wanted)


def _within(field: str, value: float, smallest: float, largest: float) -> float:
    if not (math.isfinite(value) and smallest <= value <= largest):
        raise invalid(field, f"needed {smallest:g} to {largest:g}, got {value:g}")
    return value


def _num_logprobs(field: str, wanted: int | None) -> int | None:
    if wanted is not None and wanted > MAX_LOGPROBS:
        raise invalid(field, f"at most {MAX_LOGPROBS}, got {wanted}")
    return wanted


def _logit_bias(sampling: worker_pb2.SamplingParams) -> dict[int, float]:
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise invalid("sampling.logit_bias", f"at most {MAX_LOGIT_BIASES} token ids, got {len(sampling.logit_bias)}")
    return {
        token_id: _within("sampling.logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        for token_id, bias in sampling.logit_bias.items()
    }

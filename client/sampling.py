"""How the next token is chosen: the sampling options of generate() and chat(), and their checked form."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypedDict

from kvpool.v1 import worker_pb2

from .errors import InvalidRequest

MAX_TEMPERATURE: Final = 100.0
MAX_REPETITION_PENALTY: Final = 10.0
MAX_PENALTY: Final = 2.0
MAX_LOGIT_BIAS: Final = 100.0
MAX_LOGIT_BIASES: Final = 1024


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments that choose the next token. In this order: logit_bias, penalties, temperature, top_k, top_p, min_p."""

    temperature: float
    """0, the default: always the most likely token. Otherwise logits are divided by it; at most 100."""
    top_k: int
    """Keep the k most likely tokens; 0, the default: all."""
    top_p: float
    """Keep the smallest set of most likely tokens whose probabilities sum to at least top_p; 1, the default: all."""
    min_p: float
    """Drop tokens whose probability is less than min_p times that of the most likely one; 0, the default: none."""
    repetition_penalty: float
    """Logits of tokens that occur in prompt or answer are divided by it if positive, else multiplied; 1, the default: none. In
    (0, 10]."""
    presence_penalty: float
    """Subtracted from the logits of tokens that occur in the answer; 0, the default: none. In [-2, 2]."""
    frequency_penalty: float
    """Subtracted from a token's logit as often as it occurs in the answer; 0, the default: none. In [-2, 2]."""
    logit_bias: Mapping[int, float]
    """Token id → what is added to its logit, in [-100, 100]; at most 1,024 ids."""
    seed: int | None
    """0 … 2**64 − 1; the same seed gives the same text. None: a random one."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The options, checked and with every default filled in."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    """Chosen at random by the client when sampling without one, so that every attempt draws alike."""

    @classmethod
    def from_options(cls, options: SamplingOptions) -> SamplingSettings:
        """Check the options; InvalidRequest names the first one that is wrong and what it may be."""
        temperature = float(options.get("temperature", 0.0))
        top_k = options.get("top_k", 0)
        top_p = float(options.get("top_p", 1.0))
        min_p = float(options.get("min_p", 0.0))
        repetition = float(options.get("repetition_penalty", 1.0))
        presence = float(options.get("presence_penalty", 0.0))
        frequency = float(options.get("frequency_penalty", 0.0))
        bias = {int(token_id): float(value) for token_id, value in options.get("logit_bias", {}).items()}
        seed = options.get("seed")
        # NaN is in no range.
        require(0 <= temperature <= MAX_TEMPERATURE, "temperature", temperature, f"in [0, {MAX_TEMPERATURE:g}]")
        require(0 <= top_k < 2**32, "top_k", top_k, "at least 0")
        require(0 < top_p <= 1, "top_p", top_p, "in (0, 1]")
        require(0 <= min_p <= 1, "min_p", min_p, "in [0, 1]")
        require(
            0 < repetition <= MAX_REPETITION_PENALTY,
            "repetition_penalty",
            repetition,
            f"in (0, {MAX_REPETITION_PENALTY:g}]",
        )
        for name, penalty in (("presence_penalty", presence), ("frequency_penalty", frequency)):
            require(abs(penalty) <= MAX_PENALTY, name, penalty, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")
        require(len(bias) <= MAX_LOGIT_BIASES, "logit_bias", len(bias), f"of {MAX_LOGIT_BIASES} token ids at most")
        for token_id, value in bias.items():
            require(0 <= token_id < 2**32, "logit_bias", token_id, "of token ids")
            require(abs(value) <= MAX_LOGIT_BIAS, "logit_bias", value, f"in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]")
        require(seed is None or 0 <= seed < 2**64, "seed", seed, "in 0 … 2**64 − 1")
        return cls(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias=bias,
            seed=secrets.randbits(64) if seed is None and temperature > 0 else seed or 0,
        )

    def message(self) -> worker_pb2.SamplingParams:
        """As a worker is told."""
        return worker_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
        )


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """InvalidRequest, naming the option, unless it holds."""
    if not holds:
        raise InvalidRequest(f"{name} must be {expected}; got {value!r}", reason="BAD_FIELD")

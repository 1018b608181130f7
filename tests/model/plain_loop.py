"""What a request must be answered: one token after the other from eager logits, with the sampling options in plain Python."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvpool.client import GenerateOptions
from kvpool.client.request import build_request
from kvpool.protocol.sampling import sampling_fields
from kvpool.worker_service.step import SamplingParams
from tests.model import sampling_oracle
from tests.model.sampling_oracle import Row

NOISE: Final = 1e-4
"""Far more than float32's rounding: an oracle that such a difference changes proves nothing."""
TRIES: Final = 64
"""Of two tokens that rounding alone decides between, noise gives the other one about every second time."""


class ProvesNothing(AssertionError):
    """The next token hangs on less than NOISE."""


class PlainLoop:
    """A model in float32, without a cache."""

    def __init__(self, model: Path | PreTrainedModel) -> None:
        if isinstance(model, Path):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self._model: PreTrainedModel = model.eval()

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of all positions, [T, vocab_size]."""
        with torch.inference_mode():
            found: torch.Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return found

    def text(self, prompt: Sequence[int], options: GenerateOptions, count: int) -> list[int]:
        """The tokens after the prompt, up to an id of stop_token_ids. Raises ProvesNothing."""
        params = _params(options)
        stops = list(options.get("stop_token_ids", ()))
        generated: list[int] = []
        while len(generated) < count:
            banned = stops if len(generated) < options.get("min_tokens", 0) else []
            row = Row(params, prompt, tuple(generated), banned, len(prompt) + len(generated))
            logits = self.logits([*prompt, *generated])[-1].tolist()
            token = sampling_oracle.sampled(logits, row)
            if near_choices(logits, row, 3) != {token}:
                raise ProvesNothing(f"{options} prove nothing at token {len(generated)}")
            if token in stops:
                break
            generated.append(token)
        return generated

    def differences(
        self, prompt: Sequence[int], options: GenerateOptions, tokens: Sequence[int]
    ) -> Iterator[tuple[int, bool]]:
        """Where an answer is not what `text` would give after the tokens before: the index, and whether it is a tie, so that
        rounding may decide. One forward pass; `options` are of sampling alone."""
        params = _params(options)
        logits = self.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        for index, token in enumerate(tokens):
            row = Row(params, prompt, tokens[:index], (), len(prompt) + index)
            values = logits[index].tolist()
            if token != sampling_oracle.sampled(values, row):
                yield index, token in near_choices(values, row, TRIES)


def near_choices(logits: Sequence[float], row: Row, tries: int) -> set[int]:
    """What the next token is in so many tries if each logit is off by at most NOISE."""
    noise = random.Random(row.position)
    return {
        sampling_oracle.sampled([value + noise.uniform(-NOISE, NOISE) for value in logits], row) for _ in range(tries)
    }


def _params(options: GenerateOptions) -> SamplingParams:
    return SamplingParams(**sampling_fields(build_request(options).sampling))

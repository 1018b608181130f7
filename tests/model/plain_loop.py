"""What a request must be answered: one token after the other from eager logits, with the sampling options in plain Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvpool.client import GenerateOptions
from kvpool.client.options import GenerateSettings
from kvpool.worker_service.engine.sampling_params import SamplingParams
from tests.model import sampling_oracle
from tests.model.sampling_oracle import Row

NOISE: Final = 1e-4
"""Far more than float32's rounding: an oracle that such a difference changes proves nothing."""


class ProvesNothing(AssertionError):
    """The next token hangs on less than NOISE."""


class PlainLoop:
    """A model in float32, without a cache."""

    def __init__(self, path: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._noise = random.Random(0)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of all positions, [T, vocab_size]."""
        with torch.inference_mode():
            found: torch.Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return found

    def text(self, prompt: Sequence[int], options: GenerateOptions, count: int) -> list[int]:
        """The tokens behind the prompt, up to an id of stop_token_ids. Raises ProvesNothing."""
        message = GenerateSettings.from_options(options).sampling.message()
        params = SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            seed=message.seed,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=dict(message.logit_bias),
        )
        stops = list(options.get("stop_token_ids", ()))
        generated: list[int] = []
        while len(generated) < count:
            banned = stops if len(generated) < options.get("min_tokens", 0) else []
            position = len(prompt) + len(generated)
            row = Row(params, prompt, tuple(generated), banned, position)
            logits = self.logits([*prompt, *generated])[-1].tolist()
            token = sampling_oracle.sampled(logits, row)
            for _ in range(3):
                noisy = [value + self._noise.uniform(-NOISE, NOISE) for value in logits]
                if sampling_oracle.sampled(noisy, row) != token:
                    raise ProvesNothing(f"{options} prove nothing at token {len(generated)}")
            if token in stops:
                break
            generated.append(token)
        return generated

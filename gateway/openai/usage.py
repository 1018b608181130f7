"""Encodes the tokens that a request has used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvpool.client import Chunk, Completion

from .bodies import StreamOptions
from .generation import GenerationStreams


def encode_usage(
    completions: Sequence[Completion], num_per_prompt: int, *, drop_generated: bool = False
) -> dict[str, Any]:
    """Encode the usage of all answers. `num_per_prompt` of them in a row have one prompt, which counts once, with the cached tokens
    of the first of them. `drop_generated`: the generated tokens do not count."""
    first = completions[::num_per_prompt]
    num_prompt = sum(completion.num_prompt_tokens for completion in first)
    num_generated = 0 if drop_generated else sum(completion.num_generated_tokens for completion in completions)
    return {
        **_counts(num_prompt, num_generated),
        "prompt_tokens_details": {"cached_tokens": sum(completion.num_cached_tokens for completion in first)},
    }


def _counts(num_prompt: int, num_generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


class StreamUsage:
    """Usage in the events of a stream, as its options ask: none; null in all events but the last; or, as in vLLM, the usage of its
    answer so far in each event."""

    def __init__(
        self, generation: GenerationStreams, options: StreamOptions | None, *, drop_generated: bool = False
    ) -> None:
        """`drop_generated`: the generated tokens do not count."""
        self.is_wanted = options is not None and bool(options.include_usage)
        self._is_continuous = self.is_wanted and options is not None and bool(options.continuous_usage_stats)
        self._generation = generation
        self._drop_generated = drop_generated
        self._num_generated: Counter[int] = Counter()

    def add(self, choice: int, chunk: Chunk) -> None:
        """Count the next piece of an answer."""
        if not self._drop_generated:
            self._num_generated[choice] += len(chunk.token_ids)

    def of(self, choice: int) -> dict[str, Any]:
        """Return the fields of usage for an event of this choice."""
        if not self.is_wanted:
            return {}
        if not self._is_continuous:
            return {"usage": None}
        num_prompt = len(self._generation.stream_of(choice).prompt_token_ids)
        return {"usage": _counts(num_prompt, self._num_generated[choice])}

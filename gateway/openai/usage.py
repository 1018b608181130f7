"""Encodes the tokens that a request has used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvpool.client import Chunk, Usage

from .bodies import StreamOptions
from .generation import GenerationStreams


def encode_usage(usages: Mapping[int, Usage], num_per_prompt: int, *, drop_generated: bool = False) -> dict[str, Any]:
    """Encode `usages`, which are by the answer's choice. `num_per_prompt` answers have one prompt, which counts once, with the
    cached tokens of the first of them. `drop_generated`: the generated tokens do not count."""
    first = [usage for index, usage in usages.items() if index % num_per_prompt == 0]
    num_prompt = sum(usage.num_prompt_tokens for usage in first)
    num_generated = 0 if drop_generated else sum(usage.num_generated_tokens for usage in usages.values())
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in first)},
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
        num_prompt, num_generated = (
            len(self._generation.stream_of(choice).prompt_token_ids),
            self._num_generated[choice],
        )
        return {
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_generated,
                "total_tokens": num_prompt + num_generated,
            }
        }

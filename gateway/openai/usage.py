"""The tokens that a request has used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvpool.client import Chunk, Usage

from .bodies import StreamOptions
from .generation import GenerationStreams


def encode_usage(usages: Mapping[int, Usage], num_per_prompt: int, *, drop_generated: bool = False) -> dict[str, Any]:
    """`usages` by the answer's index; `num_per_prompt` answers have one prompt, which counts once, with what the cache served of it
    to the first of them. `drop_generated`: the generated tokens were not wanted."""
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
    """What the events of a stream say of usage, as its options ask: nothing; null in all but the last one; or, as vLLM has it, in
    each event what its answer has used so far."""

    def __init__(
        self, generation: GenerationStreams, options: StreamOptions | None, *, drop_generated: bool = False
    ) -> None:
        """`drop_generated`: the generated tokens were not wanted."""
        self.is_wanted = options is not None and bool(options.include_usage)
        self._is_continuous = self.is_wanted and options is not None and bool(options.continuous_usage_stats)
        self._generation = generation
        self._drop_generated = drop_generated
        self._num_generated: Counter[int] = Counter()

    def add(self, choice: int, chunk: Chunk) -> None:
        """The next piece of an answer has come."""
        if not self._drop_generated:
            self._num_generated[choice] += len(chunk.token_ids)

    def of(self, choice: int) -> dict[str, Any]:
        """For an event of that answer."""
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

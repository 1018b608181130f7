"""The tokens that a request has used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool.client import Usage


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

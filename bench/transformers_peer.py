"""transformers' continuous batching as a process: a line of JSON in, a line of JSON out.

In: {"prompts": [[token ids], …], "max_new_tokens": n}; out: {"seconds": s, "cpu_seconds": s, "num_tokens": [tokens generated, …]}.

Its manager persists between batches, with its cached prefixes, so that a batch pays neither for building it nor for a cold start.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import transformers


class Peer:
    """One model with a continuous batching manager."""

    def __init__(self, folder: str, *, page_size: int, num_tokens: int, max_batch_tokens: int | None) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self._config = transformers.ContinuousBatchingConfig(
            page_size=page_size, num_blocks=num_tokens // page_size, max_batch_tokens=max_batch_tokens
        )

    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
        """Greedy tokens for all prompts, past any end of text."""
        greedy = transformers.GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        cpu_before = time.process_time()
        began = time.perf_counter()
        outputs = self._model.generate_batch(
            prompts,
            generation_config=greedy,
            continuous_batching_config=self._config,
            persistent_manager=True,
            warmup=False,
        )
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu_before,
            "num_tokens": [len(output.generated_tokens) for output in outputs.values()],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--page-size", type=int, required=True)
    parser.add_argument("--num-tokens", type=int, required=True, help="capacity of its cache")
    parser.add_argument("--max-batch-tokens", type=int, help="default: its own choice")
    arguments = parser.parse_args()
    peer = Peer(
        arguments.folder,
        page_size=arguments.page_size,
        num_tokens=arguments.num_tokens,
        max_batch_tokens=arguments.max_batch_tokens,
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(peer.generate(asked["prompts"], asked["max_new_tokens"])), flush=True)


if __name__ == "__main__":
    main()

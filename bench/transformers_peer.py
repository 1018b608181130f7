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


def load_model(folder: str) -> Any:
    """The model as transformers serves it best on a CPU."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval()


def arguments_of(doc: str | None) -> argparse.Namespace:
    """The command line: which model, and how its continuous batching is set."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--page-size", type=int, required=True)
    parser.add_argument("--num-tokens", type=int, required=True, help="capacity of its cache")
    parser.add_argument("--max-batch-tokens", type=int, help="default: its own choice")
    return parser.parse_args()


def batching_config(arguments: argparse.Namespace) -> transformers.ContinuousBatchingConfig:
    """Of its manager."""
    return transformers.ContinuousBatchingConfig(
        page_size=arguments.page_size,
        num_blocks=arguments.num_tokens // arguments.page_size,
        max_batch_tokens=arguments.max_batch_tokens,
    )


class Peer:
    """One model with a continuous batching manager."""

    def __init__(self, model: Any, config: transformers.ContinuousBatchingConfig) -> None:
        self._model = model
        self._config = config

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
    arguments = arguments_of(__doc__)
    peer = Peer(load_model(arguments.folder), batching_config(arguments))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(peer.generate(asked["prompts"], asked["max_new_tokens"])), flush=True)


if __name__ == "__main__":
    main()

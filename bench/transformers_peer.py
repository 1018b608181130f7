"""transformers' continuous batching at the other end of a pipe: requests one by one, tokens as they are sampled.

python -m bench.transformers_peer FOLDER --page-size P --num-tokens N [--max-batch-tokens M]
"""

from __future__ import annotations

from bench.pipe import serve_peer, take_stdout

_pipe = take_stdout()

import argparse  # noqa: E402
import asyncio  # noqa: E402
import itertools  # noqa: E402
from collections.abc import AsyncGenerator  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402


class Peer:
    """A model with a continuous batching manager, which keeps cached prefixes between requests."""

    def __init__(self, folder: str, *, page_size: int, num_tokens: int, max_batch_tokens: int | None) -> None:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        )
        config = transformers.ContinuousBatchingConfig(
            page_size=page_size, num_blocks=num_tokens // page_size, max_batch_tokens=max_batch_tokens
        )
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.eval().init_continuous_batching(greedy, config)
        self._manager.start()
        self._numbers = itertools.count()

    async def generate(self, prompt: list[int], num_tokens: int) -> AsyncGenerator[tuple[list[int], int | None], None]:
        """Greedy tokens, past any end of text."""
        name = str(next(self._numbers))
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._manager.register_result_handler(name, outputs.put_nowait)
        self._manager.add_request(prompt, request_id=name, max_new_tokens=num_tokens, streaming=True)
        num_seen = 0
        try:
            while num_seen < num_tokens:
                output = await outputs.get()
                if output.error is not None:
                    raise RuntimeError(output.error)
                # Each output has all tokens so far, and may be the same list, which still grows.
                tokens = list(output.generated_tokens)
                if len(tokens) > num_seen:
                    yield tokens[num_seen:], None
                    num_seen = len(tokens)
        finally:
            if num_seen < num_tokens:
                self._manager.cancel_request(name)

    def stop(self) -> None:
        """End its thread."""
        self._manager.stop(block=True, timeout=5)


async def serve(arguments: argparse.Namespace) -> None:
    """Load, and serve until the pipe is closed."""
    peer = Peer(
        arguments.folder,
        page_size=arguments.page_size,
        num_tokens=arguments.num_tokens,
        max_batch_tokens=arguments.max_batch_tokens,
    )
    await serve_peer(_pipe, peer, {"engine": f"transformers {transformers.__version__}", "torch": torch.__version__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--page-size", type=int, required=True)
    parser.add_argument("--num-tokens", type=int, required=True, help="capacity of its cache")
    parser.add_argument("--max-batch-tokens", type=int, help="default: its own choice")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()

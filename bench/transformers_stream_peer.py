"""transformers' continuous batching at the other end of a pipe: requests come one by one, tokens go as they come.

python -m bench.transformers_stream_peer FOLDER --page-size P --num-tokens N [--max-batch-tokens M]
"""

from __future__ import annotations

from bench.pipe import Child, take_stdout

_pipe = take_stdout()

import asyncio  # noqa: E402
import itertools  # noqa: E402
from collections.abc import AsyncGenerator  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402

from bench.transformers_peer import arguments_of, batching_config, load_model  # noqa: E402


class Peer:
    """One model with a continuous batching manager, which keeps its cached prefixes between requests."""

    def __init__(self, model: Any, config: transformers.ContinuousBatchingConfig) -> None:
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.init_continuous_batching(greedy, config)
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
                # Each output has all tokens so far, and may be the same list that grows on meanwhile.
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


async def serve(peer: Peer) -> None:
    """Serve until the pipe is closed."""
    try:
        await Child(_pipe, peer.generate).serve(
            {"engine": f"transformers {transformers.__version__}", "torch": torch.__version__}
        )
    finally:
        peer.stop()


def main() -> None:
    arguments = arguments_of(__doc__)
    peer = Peer(load_model(arguments.folder), batching_config(arguments))
    asyncio.run(serve(peer))


if __name__ == "__main__":
    main()

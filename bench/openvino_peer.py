"""OpenVINO GenAI at the other end of a pipe: its continuous batching pipeline, with prefix caching. Runs in .venv-openvino.

python -m bench.openvino_peer FOLDER --num-tokens N --threads N [--precision bf16]

FOLDER is an exported model: see bench.peer_models.
"""

from __future__ import annotations

from bench.pipe import serve_peer, take_stdout

_pipe = take_stdout()

import argparse  # noqa: E402
import asyncio  # noqa: E402
import itertools  # noqa: E402
import queue  # noqa: E402
import threading  # noqa: E402
from collections.abc import AsyncGenerator, Sequence  # noqa: E402
from importlib.metadata import version  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

BLOCK_SIZE = 32
"""Of its paged attention on CPUs; it has no other."""


class Asked(NamedTuple):
    """A request to the thread that runs the steps."""

    prompt: list[int]
    num_tokens: int
    answer: asyncio.Queue[list[int] | Exception]
    is_abandoned: threading.Event


Answered = tuple[Asked, list[int] | Exception]
"""New tokens of a request, or what ended it."""


class Peer:
    """One ContinuousBatchingPipeline, whose steps run in a thread."""

    def __init__(self, folder: str, *, num_tokens: int, threads: int, precision: str | None) -> None:
        import openvino
        import openvino_genai

        properties: dict[str, object] = {"INFERENCE_NUM_THREADS": threads}
        if precision is not None:
            properties |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = num_tokens // BLOCK_SIZE
        scheduler.enable_prefix_caching = True
        self._genai: Any = openvino_genai
        self._tensor: Any = openvino.Tensor
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._running: dict[Any, Asked] = {}
        """By the handle of the pipeline."""
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def generate(self, prompt: list[int], num_tokens: int) -> AsyncGenerator[tuple[list[int], int | None], None]:
        """Greedy tokens, past any end of text. What was cached is not known."""
        asked = Asked(prompt, num_tokens, asyncio.Queue(), threading.Event())
        self._asked.put(asked)
        missing = num_tokens
        try:
            while missing > 0:
                tokens = await asked.answer.get()
                if isinstance(tokens, Exception):
                    raise tokens
                missing -= len(tokens)
                yield tokens, None
        finally:
            asked.is_abandoned.set()

    def stop(self) -> None:
        """End its thread."""
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Steps for as long as there are requests, until it is stopped."""
        while self._take():
            try:
                self._pipeline.step()
                found: list[Answered] = [(asked, self._read(handle)) for handle, asked in self._running.items()]
            except Exception as error:
                found = [(asked, error) for asked in self._running.values()]
                self._running.clear()
            self._loop.call_soon_threadsafe(_deliver, found)
            for handle in [handle for handle in self._running if self._has_ended(handle)]:
                del self._running[handle]

    def _take(self) -> bool:
        """Pass new requests to the pipeline; waits for one if none runs. False: it is stopped."""
        while not self._running or not self._asked.empty():
            if (asked := self._asked.get()) is None:
                return False
            config = self._genai.GenerationConfig()
            config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, asked.num_tokens
            try:
                handle = self._pipeline.add_request(next(self._numbers), self._tensor([asked.prompt]), config)
            except Exception as error:
                self._loop.call_soon_threadsafe(_deliver, [(asked, error)])
            else:
                self._running[handle] = asked
        return True

    def _read(self, handle: Any) -> list[int]:
        """The tokens that have come since the last time."""
        tokens: list[int] = []
        while handle.can_read():
            for output in handle.read().values():
                tokens += output.generated_ids
        return tokens

    def _has_ended(self, handle: Any) -> bool:
        """Its last token was read, or its reader has gone: then it is cancelled."""
        if self._running[handle].is_abandoned.is_set():
            handle.cancel()
        return bool(handle.get_status() != self._genai.GenerationStatus.RUNNING)


def _deliver(found: Sequence[Answered]) -> None:
    for asked, tokens in found:
        if tokens:
            asked.answer.put_nowait(tokens)


async def serve(arguments: argparse.Namespace) -> None:
    """Load, and serve until the pipe is closed."""
    peer = Peer(
        arguments.folder,
        num_tokens=arguments.num_tokens,
        threads=arguments.threads,
        precision=arguments.precision,
    )
    await serve_peer(
        _pipe, peer, {"engine": f"OpenVINO GenAI {version('openvino-genai')}", "openvino": version("openvino")}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--num-tokens", type=int, required=True, help="capacity of its cache")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", help="of computation and KV (default: its own choice)")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()

"""The blocking client, for code without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, TypeVar

from .chunk import Chunk
from .client import Client
from .completion import Completion
from .config import ClientConfig
from .errors import Cancelled, FailedPrecondition
from .explanation import Explanation
from .stream import GenerateStream

_T = TypeVar("_T")
_P = ParamSpec("_P")


class _LoopThread:
    """An event loop in a thread of its own. Safe to use from several threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpool-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` in the loop and wait for its result. An interrupt while waiting (Ctrl-C) cancels the work.

        FailedPrecondition (CLOSED) if close() was called before, Cancelled (CLOSED) if it is called while we wait.
        """
        with self._lock:
            if self._is_closing:
                work.close()
                raise FailedPrecondition("this client is closed; make a new one", reason="CLOSED")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if not self._is_closing:
                raise
            raise Cancelled("the client was closed before this call had its result", reason="CLOSED") from None
        except BaseException:
            future.cancel()
            raise

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Refuse new work, cancel the work that runs, run `finish` last and end the thread. May be repeated."""
        with self._lock:
            is_first = not self._is_closing
            self._is_closing = True
        if not is_first:
            self._thread.join()
            return
        try:
            asyncio.run_coroutine_threadsafe(self._cancel_others_and(finish), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _cancel_others_and(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        # A task that is left in the loop would never give its result to the thread that waits for it. All of them
        # are here: the lock puts their start before ours.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await finish()


class SyncStream:
    """A GenerateStream to be used with `for` and `with`; leaving the block cancels the call."""

    def __init__(self, stream: GenerateStream, loop: _LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def sequence_id(self) -> str:
        """Name of the sequence at the manager and the workers."""
        return self._stream.sequence_id

    @property
    def explanation(self) -> Explanation | None:
        """Explanation of what the cache could serve; see GenerateStream.explanation."""
        return self._stream.explanation

    def __iter__(self) -> SyncStream:
        return self

    def __next__(self) -> Chunk:
        chunk = self._loop.run(self._stream.next_chunk())
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the request; its call is cancelled if it still runs. May be repeated, also after the client's close."""
        # A client that closes ends its streams; the `with` of one of them must not hide the error that says so.
        with contextlib.suppress(Cancelled, FailedPrecondition):
            self._loop.run(self._stream.aclose())

    def collect(self) -> Completion:
        """Wait for the end and return the whole answer; with `n` it is the first one, which is the best of a beam search."""
        return self._loop.run(self._stream.collect())

    def collect_all(self) -> list[Completion]:
        """Wait for the end and return all answers, by their index."""
        return self._loop.run(self._stream.collect_all())


def _blocking(
    method: Callable[Concatenate[Client, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[SyncClient, _P], _T]:
    """Return the blocking form of a method of Client, with its arguments and its docstring."""

    @functools.wraps(method)
    def call(self: SyncClient, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        return self._loop.run(method(self._client, *arguments, **options))

    return call


def _streaming(
    method: Callable[Concatenate[Client, _P], GenerateStream],
) -> Callable[Concatenate[SyncClient, _P], SyncStream]:
    """Do the same for a method that returns a stream of chunks."""

    @functools.wraps(method)
    def call(self: SyncClient, /, *arguments: _P.args, **options: _P.kwargs) -> SyncStream:
        return SyncStream(method(self._client, *arguments, **options), self._loop)

    return call


def _iterating(
    method: Callable[Concatenate[Client, _P], AsyncGenerator[_T, None]],
) -> Callable[Concatenate[SyncClient, _P], Generator[_T, None, None]]:
    """Do the same for a method that returns a generator. Closing the result ends it."""

    async def next_of(items: AsyncGenerator[_T, None]) -> _T:
        return await anext(items)

    async def close(items: AsyncGenerator[_T, None]) -> None:
        await items.aclose()

    @functools.wraps(method)
    def call(self: SyncClient, /, *arguments: _P.args, **options: _P.kwargs) -> Generator[_T, None, None]:
        items = method(self._client, *arguments, **options)
        try:
            while True:
                yield self._loop.run(next_of(items))
        finally:
            with contextlib.suppress(Cancelled, FailedPrecondition):
                self._loop.run(close(items))

    return call


class SyncClient:
    """Has the methods of Client, in blocking form; see there. generate and chat return a SyncStream, and watch a generator, whose
    end is the stream's. Its event loop runs in a thread of its own.

    Use it as `with SyncClient() as client`, or call close(). Safe to use from several threads.
    """

    def __init__(self, manager: str | None = None, *, config: ClientConfig | None = None) -> None:
        self._client = Client(manager, config=config)
        self._loop = _LoopThread()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel calls that still run, in any thread (Cancelled), close all channels and end the thread. May be
        repeated."""
        self._loop.close(self._client.close)

    generate = _streaming(Client.generate)
    chat = _streaming(Client.chat)
    watch = _iterating(Client.watch)
    model = _blocking(Client.model)
    describe = _blocking(Client.describe)
    describe_block = _blocking(Client.describe_block)
    check = _blocking(Client.check)
    route = _blocking(Client.route)
    explain = _blocking(Client.explain)
    drain = _blocking(Client.drain)

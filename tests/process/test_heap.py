"""Memory of a process: what a large request took goes back, at most once a second; imports are left out of collections."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from kvpool.process import heap
from kvpool.process.heap import LARGE_BYTES, Heap
from kvpool.process.imports import without_collections
from tests.python_program import run_python
from tests.until import until

KEPT = """
import asyncio, os, threading
from kvpool.process import heap

heap.DELAY_SECONDS = 0.0

def resident() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def main() -> None:
    # As after a message of 16 MiB: glibc keeps up to this size for itself now. Small blocks, with one at the end that stays.
    before = resident()
    blocks = [bytearray(50_000) for _ in range(1000)]
    end = bytearray(50_000)
    del blocks
    kept = resident() - before
    heap.Heap().after_request(heap.LARGE_BYTES)
    for _ in range(100):
        await asyncio.sleep(0.05)
        if resident() - before < 10 << 20:
            break
    print(kept >> 20, resident() - before >> 20, len(end))

asyncio.run(main())
"""


async def test_only_large_requests_count_and_those_of_one_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(heap, "_trim", trims.append)
    monkeypatch.setattr(heap, "DELAY_SECONDS", 0.01)
    tested = Heap()
    tested.after_request(LARGE_BYTES - 1)
    await asyncio.sleep(0.1)
    assert trims == []
    for _ in range(2):
        trims.clear()
        for _ in range(3):
            tested.after_request(LARGE_BYTES)
        await until(lambda: trims)
        await asyncio.sleep(0.1)
        assert trims == [0]


async def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_trim", None)
    Heap().after_request(LARGE_BYTES)


@pytest.mark.skipif(heap._trim is None, reason="the C library has no malloc_trim")
def test_what_the_allocator_kept_is_given_back() -> None:
    done = run_python("-c", KEPT)
    kept, left, _ = map(int, done.stdout.split())
    assert kept > 40
    assert left < 10


def test_imported_objects_are_left_out_of_collections() -> None:
    gc.collect()  # garbage would be frozen too, and kept
    objects: list[Any] = []
    with without_collections():
        assert not gc.isenabled()
        objects.append([objects])
        num_frozen = gc.get_freeze_count()
    assert gc.isenabled()
    assert gc.get_freeze_count() > num_frozen
    assert not any(found is objects for found in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    gc.collect()
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()

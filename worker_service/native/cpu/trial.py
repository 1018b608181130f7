"""python -m kvpool.worker_service.native.trial LIBRARY: run one step of a tiny model, in a process that may die of it.

A compiled file may contain instructions that this CPU does not have, and a process that runs one is killed. Exit status 0: the
step ran, and its logits do not depend on the number of threads. `why_it_does_not_run` starts such a process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import addressof, byref
from pathlib import Path
from typing import Any

from .compiler import one_line, run_command
from .library import Group, Layer, Library, Linear, Norm, Sizes, StepArguments, open_library

_TOKENS, _VOCAB, _BLOCK = 7, 32, 16
_LIMIT_S = 60.0


def why_it_does_not_run(file: Path) -> str | None:
    """The reason why this library cannot run a step here, found in another process; None if it can. Raises OSError if no process
    can be started."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    finished = run_command((sys.executable, "-m", __name__, str(file)), _LIMIT_S, {"PYTHONPATH": paths})
    if finished.status == 0:
        return None
    if finished.status is None:
        return f"took more than {_LIMIT_S:.0f} s"
    if finished.status < 0:
        return f"ended by signal {-finished.status}"
    return one_line((finished.output.splitlines() or [f"exit status {finished.status}"])[-1])


def main() -> None:
    """Try the library that the command line names."""
    library = open_library(Path(sys.argv[1]))
    alone, together = logits(library, num_threads=1), logits(library, num_threads=3)
    if alone != together:
        sys.exit("the logits of one thread and of three differ")
    if not any(alone):
        sys.exit("all logits are zero")


def logits(library: Library, num_threads: int) -> list[float]:
    """Of the last token of a prompt, from a model of one layer; its weights are a function of their index."""
    size = 2 * library.words_per_vector
    memory: list[Any] = []

    def numbers(count: int) -> int:
        if library.numbers_per_word == 1:
            floats = [((7 * i) % 31 - 15) / 16 for i in range(count)]
            memory.append((ctypes.c_float * count)(*floats))
        else:  # bfloat16 between 0.5 and 1 with either sign
            memory.append(
                (ctypes.c_uint16 * count)(*(0x3F00 + (7 * i) % 127 + (i % 3 == 0) * 0x8000 for i in range(count)))
            )
        return addressof(memory[-1])

    def integers(kind: type[ctypes.c_int32] | type[ctypes.c_int64], values: list[int]) -> int:
        memory.append((kind * len(values))(*values))
        return addressof(memory[-1])

    def linear(n: int, k: int) -> Linear:
        return Linear(weight=numbers(n * k), n=n, k=k)

    norm, table = (
        Norm(None, None, 1e-5, 0, 1, 0),
        (ctypes.c_float * (_TOKENS * size // 2))(*[0.5] * (_TOKENS * size // 2)),
    )
    layer = Layer(
        heads=1,
        kv_heads=1,
        head_size=size,
        before_attention=norm,
        before_mlp=norm,
        qkv=linear(3 * size, size),
        out=linear(size, size),
        up=linear(4 * size, size),
        down=linear(size, 2 * size),
        cos=addressof(table),
        sin=addressof(table),
        rotary=size,
        is_gated=1,
        scaling=0.25,
        k_cache=numbers(_BLOCK * size),
        v_cache=numbers(_BLOCK * size),
    )
    sizes = Sizes(
        hidden=size,
        vocab=_VOCAB,
        num_layers=1,
        num_groups=1,
        block_size=_BLOCK,
        embedding=numbers(_VOCAB * size),
        last_norm=norm,
        head=linear(_VOCAB, size),
        embedding_scale=1,
        residual_scale=1,
    )
    found, finite = (ctypes.c_float * _VOCAB)(), (ctypes.c_uint8 * _TOKENS)()
    group = Group(
        slots=integers(ctypes.c_int64, list(range(_TOKENS))),
        table_rows=integers(ctypes.c_int64, [0]),
        tables=integers(ctypes.c_int32, [0]),
        table_stride=1,
    )
    step = StepArguments(
        num_tokens=_TOKENS,
        num_parts=1,
        num_rows=1,
        ids=integers(ctypes.c_int64, list(range(_TOKENS))),
        positions=integers(ctypes.c_int64, list(range(_TOKENS))),
        starts=integers(ctypes.c_int64, [0]),
        lengths=integers(ctypes.c_int64, [_TOKENS]),
        groups=addressof(group),
        rows=integers(ctypes.c_int64, [_TOKENS - 1]),
        logits=addressof(found),
        is_finite=addressof(finite),
    )
    model = library.functions.kvpool_open(byref(sizes), byref(layer), num_threads)
    if not model:
        sys.exit(library.functions.kvpool_problem().decode())
    if library.functions.kvpool_run(model, byref(step)):
        sys.exit("no memory")
    library.functions.kvpool_close(model)
    if not all(finite):
        sys.exit("values are not finite")
    return list(found)


if __name__ == "__main__":
    main()

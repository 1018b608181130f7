"""The compiled step: its C structures and functions, called with ctypes (see step.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class LibraryMismatch(RuntimeError):
    """The file was not built from this step.h."""


class Linear(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias", "scales")),
        ("n", c_int64),
        ("k", c_int64),
    )


class Norm(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("epsilon", c_float),
        ("is_centered", c_int32),
        ("is_used", c_int32),
        ("unused", c_int32),
    )


class Layer(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "kv_heads", "head_size", "window", "group")),
        *(
            (name, Norm)
            for name in ("before_attention", "q_norm", "k_norm", "after_attention", "before_mlp", "after_mlp")
        ),
        *((name, Linear) for name in ("qkv", "out", "up", "down")),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotary", c_int64),
        ("rotary_is_interleaved", c_int32),
        ("is_gated", c_int32),
        ("activation", c_int32),
        ("scaling", c_float),
        ("softcap", c_float),
        ("head_norms_are_whole", c_int32),
        ("head_norms_follow_rotation", c_int32),
        ("is_parallel", c_int32),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
    )


class ModelSizes(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("hidden", "vocab", "num_layers", "num_groups", "block_size")),
        ("embedding", c_void_p),
        ("positions", c_void_p),
        ("position_offset", c_int64),
        ("embedding_norm", Norm),
        ("last_norm", Norm),
        ("head", Linear),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("embedding_is_packed", c_int32),
        ("stores_products", c_int32),
    )


class GroupTables(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("slots", "table_rows", "tables")),
        ("table_stride", c_int64),
        ("num_prefixes", c_int64),
        *((name, c_void_p) for name in ("prefix_parts", "prefix_ends", "prefix_blocks")),
    )


class StepArguments(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_parts", "num_rows")),
        *(
            (name, c_void_p)
            for name in ("ids", "positions", "starts", "lengths", "groups", "rows", "logits", "is_finite")
        ),
    )


class _Build(Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "words_per_vector",
            "numbers_per_word",
            "rows_per_pass",
            "max_head_size",
            "sizes_bytes",
            "layer_bytes",
            "group_bytes",
            "step_bytes",
            "has_tiles",
        )
    )


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """A compiled step for one number type."""

    path: Path
    words_per_vector: int
    """Outputs of one vector of a packed weight; also the least multiple of head sizes."""
    numbers_per_word: int
    """Numbers of the type in 32 bits."""
    rows_per_pass: int
    """Rows, or (token, head) pairs, that are computed at once."""
    max_head_size: int
    has_tiles: bool
    """Products are computed in AMX's tile registers."""
    functions: Any
    """The ctypes library. Its calls release the GIL."""
    origin: str = ""
    """What the library was built for, for the log: `built for x86-64-v4`. Empty: it is not shown."""

    def describe(self) -> str:
        """Instruction set, number type and origin, for the log."""
        vectors = {16: "AVX-512", 8: "AVX2"}.get(self.words_per_vector, f"vectors of {32 * self.words_per_vector} bits")
        parts = (
            f"{vectors} and AMX" if self.has_tiles else vectors,
            "float32" if self.numbers_per_word == 1 else "bfloat16",
            self.origin,
        )
        return ", ".join(part for part in parts if part)


def open_library(path: Path) -> Library:
    """Load a compiled step. Raises OSError if the file cannot be loaded, LibraryMismatch if its structures are others."""
    functions = ctypes.CDLL(str(path))
    try:
        _declare(functions)
    except AttributeError as error:
        raise LibraryMismatch(f"{path} lacks a function: {error}") from error
    build = _Build()
    functions.kvpool_describe_build(ctypes.byref(build))
    sizes = (build.sizes_bytes, build.layer_bytes, build.group_bytes, build.step_bytes)
    expected = tuple(ctypes.sizeof(kind) for kind in (ModelSizes, Layer, GroupTables, StepArguments))
    if sizes != expected:
        raise LibraryMismatch(f"{path} has structures of {sizes} bytes, needed: {expected}")
    return Library(
        path,
        build.words_per_vector,
        build.numbers_per_word,
        build.rows_per_pass,
        build.max_head_size,
        bool(build.has_tiles),
        functions,
    )


def _declare(functions: Any) -> None:
    signatures: dict[str, tuple[Any, Sequence[Any]]] = {
        "kvpool_open": (c_void_p, (POINTER(ModelSizes), POINTER(Layer), c_int64)),
        "kvpool_problem": (c_char_p, ()),
        "kvpool_run": (ctypes.c_int, (c_void_p, POINTER(StepArguments))),
        "kvpool_close": (None, (c_void_p,)),
        "kvpool_num_phases": (c_int64, (c_void_p,)),
        "kvpool_phase_seconds": (ctypes.c_int, (c_void_p, POINTER(c_double))),
        "kvpool_pack": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int64)),
        "kvpool_describe_build": (None, (POINTER(_Build),)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, list(arguments)

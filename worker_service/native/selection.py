"""Which compiled step a worker loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .build_cache import compiled_library
from .compiler import NoNativeLibrary, NumberType, given_command
from .library import Library
from .prebuilt import NoPrebuiltStep, NothingPrebuilt, prebuilt_library


def select_library(number_type: NumberType, cache_dir: Path, progress: Callable[[str], None]) -> Library:
    """The step for this number type: a prebuilt one, else one compiled here. With $CC: one compiled by that compiler.

    A prebuilt step is as fast as one compiled for this very CPU, needs no compiler and no seconds, and computes the same bits on
    all CPUs of its kind. Raises NoNativeLibrary, and nothing else.
    """
    if given_command():
        return compiled_library(number_type, cache_dir, progress)
    try:
        return prebuilt_library(number_type, progress)
    except NoPrebuiltStep as error:
        missing = error
    try:
        library = compiled_library(number_type, cache_dir, progress)
    except NoNativeLibrary as error:
        raise NoNativeLibrary(f"{missing} {error}") from error
    if not isinstance(missing, NothingPrebuilt):
        progress(str(missing))
    return library

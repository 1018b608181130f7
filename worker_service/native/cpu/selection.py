"""Which compiled step a worker loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .build_cache import compiled_library
from .compiler import NoNativeLibrary, NumberType, given_command
from .library import Library
from .prebuilt import NoPrebuiltStep, NothingPrebuilt, prebuilt_library


def select_library(number_type: NumberType, cache_dir: Path, progress: Callable[[str], None]) -> Library:
    """The step for this number type: a prebuilt one, else one compiled here. With $CC: one compiled by that compiler, else a
    prebuilt one.

    A prebuilt step is as fast as one compiled for this very CPU, needs no compiler and no seconds, and computes the same bits on
    all CPUs of its kind. progress gets a line with the reason if the second choice is taken. Raises NoNativeLibrary, and nothing
    else.
    """
    if given_command():
        return _compiled_or_prebuilt(number_type, cache_dir, progress)
    return _prebuilt_or_compiled(number_type, cache_dir, progress)


def _compiled_or_prebuilt(number_type: NumberType, cache_dir: Path, progress: Callable[[str], None]) -> Library:
    try:
        return compiled_library(number_type, cache_dir, progress)
    except NoNativeLibrary as error:
        try:
            library = prebuilt_library(number_type, progress)
        except NothingPrebuilt:
            raise error from None
        except NoPrebuiltStep as other:
            raise NoNativeLibrary(f"{error} {other}") from other
        progress(f"{error} The prebuilt step is used.")
        return library


def _prebuilt_or_compiled(number_type: NumberType, cache_dir: Path, progress: Callable[[str], None]) -> Library:
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

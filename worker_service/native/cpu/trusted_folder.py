"""The folder of compiled steps and of what is known about them, in which only this user can write."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class NotTrusted(RuntimeError):
    """The folder cannot be used: it cannot be made, or others can write there. The message is the reason."""


def folder_of_steps(cache_dir: Path) -> Path:
    """Where it is in a cache folder."""
    return cache_dir / "native"


def trusted_folder(cache_dir: Path) -> Path:
    """The folder in this cache folder, made if it is missing. What is in it runs as this user. Raises NotTrusted."""
    folder = folder_of_steps(cache_dir)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        above, own = cache_dir.stat(), folder.stat()
    except OSError as error:
        raise NotTrusted(f"{folder} cannot be made: {error.strerror}") from error
    for path, problem in ((cache_dir, _distrust(above, is_above=True)), (folder, _distrust(own))):
        if problem:
            raise NotTrusted(f"{path} {problem}")
    return folder


def read_trusted(path: Path) -> bytes | None:
    """The content of a file in that folder; None if it is not there, or another user could have written it. Raises OSError if it
    cannot be read."""
    try:
        with path.open("rb") as file:
            return None if _distrust(os.fstat(file.fileno())) else file.read()
    except FileNotFoundError:
        return None


def _distrust(status: os.stat_result, *, is_above: bool = False) -> str | None:
    """Why another user could have put something there. In a folder above, a sticky bit keeps others from what is not theirs,
    and its group may write."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if is_above and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & (stat.S_IWOTH if is_above else stat.S_IWOTH | stat.S_IWGRP):
        return "can be written by others"
    return None

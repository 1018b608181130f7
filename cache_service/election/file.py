"""Keeps the epoch in a file with a lock next to it: the process that holds the lock leads. Works on one machine, or on a shared
disk.

The lock is the kernel's (flock), so it ends with the process, however that ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import threading
import zlib
from pathlib import Path
from typing import NoReturn

from kvpool.process.durable_file import write_durably

from .epoch import MAX_EPOCH, StateError

POLL_SECONDS = 0.02
"""Pause between two attempts to take the lock. An attempt costs microseconds, and streams wait for the next manager."""

_FILE = "epoch"
_LOCK_FILE = "lock"
_FORMAT = re.compile(rb"kvpool epoch (\d{1,8}) ([0-9a-f]{8})\n")


def encode(epoch: int) -> bytes:
    """Return the content of the state file."""
    return b"kvpool epoch %d %08x\n" % (epoch, zlib.crc32(b"%d" % epoch))


def _decode(data: bytes) -> int | None:
    """Return the epoch in a file's content; None if the content is torn or was never one."""
    match = _FORMAT.fullmatch(data)
    if match is None:
        return None
    epoch = int(match[1])
    return epoch if encode(epoch) == data and 1 <= epoch <= MAX_EPOCH else None


class FileEpochs:
    """An EpochStore in a state directory, with an exclusive lock on it.

    `open` leads at once or fails. An object made without it stands by until `lead`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = -1
        self._mutex = threading.Lock()
        self.epoch = 0
        self.found_state = False

    @classmethod
    def open(cls, directory: Path) -> FileEpochs:
        """Make the directory if there is none, lock it for the life of the process, and begin the next epoch. Blocks on the disk.

        Raises StateError if another manager holds the directory, the file in it is damaged, or the directory cannot be written.
        """
        store = cls(directory)
        store._open()
        if not store._take_lock():
            holder = os.pread(store._lock, 32, 0).decode(errors="replace").strip()
            store._unlock()
            raise StateError(
                f"state directory {directory} is held by another manager{f' (pid {holder})' if holder else ''}: stop it, give this "
                "one another --state-dir, or let this one wait for its end with --election file"
            )
        store._begin()
        return store

    async def lead(self) -> None:
        """Wait for the lock, then begin the next epoch. See EpochStore."""
        self._open()
        while True:
            if self._take_lock():
                break
            await asyncio.sleep(POLL_SECONDS)
        self._begin()

    def leads(self) -> bool:
        """Whether this process has the lock, and with it the epoch."""
        return self.epoch > 0 and self._lock >= 0

    async def keep(self) -> NoReturn:
        """Wait until cancelled: no other process can take the lock."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def raise_above(self, epoch: int) -> int:
        """Raise the epoch; writes off the event loop. See EpochStore."""
        try:
            return await asyncio.to_thread(self._raise_above, epoch)
        except OSError as error:
            raise self._unusable(error) from error

    def _raise_above(self, epoch: int) -> int:
        with self._mutex:
            if not self.leads():
                raise StateError(
                    f"state directory {self._directory} was given back: another manager may have written to it"
                )
            if self.epoch <= epoch:
                self._write(epoch + 1)
            return self.epoch

    async def release(self) -> None:
        """Release the lock. See EpochStore."""
        self.close()

    def close(self) -> None:
        """Release the directory, after a write that is under way. Idempotent."""
        with self._mutex:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unusable(error) from error

    def _take_lock(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            self._unlock()
            raise self._unusable(error) from error
        return True

    def _begin(self) -> None:
        """Begin the next epoch. Needs the lock."""
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)
            before = self._read()
            self.found_state = before > 0
            self._write(before + 1)
        except OSError as error:
            self._unlock()
            raise self._unusable(error) from error
        except StateError:
            self._unlock()
            raise

    def _unusable(self, error: OSError) -> StateError:
        return StateError(f"state directory {self._directory} cannot be used: {error.strerror}")

    def _read(self) -> int:
        """Read the epoch of the life before; 0 if there was none."""
        path = self._directory / _FILE
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return 0
        epoch = _decode(data)
        if epoch is None:
            raise StateError(
                f"{path} is damaged: {data[:64]!r} is no epoch. A smaller epoch than the last would make old grants valid again: "
                "restore the file, or stop all workers of this manager and delete it"
            )
        return epoch

    def _write(self, epoch: int) -> None:
        if epoch > MAX_EPOCH:
            raise StateError(
                f"the epochs of {self._directory} are used up ({MAX_EPOCH}): give the manager a new --state-dir"
            )
        write_durably(self._directory / _FILE, encode(epoch))
        self.epoch = epoch

"""The epoch: a number that is larger in every life of the manager, kept in its state directory.

All stamps of the manager (sessions, generations) begin with the epoch. They are unique for ever because the epoch never repeats: it
is on the disk before it is used.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import zlib
from pathlib import Path

from kvpool.process.durable_file import write_durably

MAX_EPOCH = (1 << 24) - 1
"""Stamps are 64 bits, of which the counter takes 40."""

MAX_FOREIGN_EPOCH = MAX_EPOCH >> 1
"""The largest epoch that a worker's message may raise ours to: the upper half is left for new lives of the manager."""

_FILE = "epoch"
_LOCK_FILE = "lock"
_FORMAT = re.compile(rb"kvpool epoch (\d{1,8}) ([0-9a-f]{8})\n")


class StateError(Exception):
    """The state directory cannot be used; the message says why and what to do."""


def encode(epoch: int) -> bytes:
    """The content of the state file."""
    return b"kvpool epoch %d %08x\n" % (epoch, zlib.crc32(b"%d" % epoch))


def _decode(data: bytes) -> int | None:
    """The epoch of a file's content, None if it is torn or was never one."""
    match = _FORMAT.fullmatch(data)
    if match is None:
        return None
    epoch = int(match[1])
    return epoch if encode(epoch) == data and 1 <= epoch <= MAX_EPOCH else None


class EpochStore:
    """The epoch of this life of the manager and the exclusive lock on its state directory.

    Made by `open`, which has already begun a new epoch. Safe to use from several threads; every method may block on the disk.
    """

    def __init__(self, directory: Path, lock: int) -> None:
        self._directory = directory
        self._lock = lock
        self._mutex = threading.Lock()
        self.epoch = 0
        """The current epoch; durable."""
        self.found_state = False
        """Whether there was a life before this one whose epoch the directory held."""

    @classmethod
    def open(cls, directory: Path) -> EpochStore:
        """Make the directory if there is none, lock it for the life of the process, and begin the next epoch.

        Raises StateError if another manager holds the directory, the file in it is damaged, or the directory cannot be written.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StateError(f"state directory {directory} cannot be used: {error.strerror}") from error
        store = cls(directory, lock)
        try:
            store._take_lock()
            before = store._read()
            store.found_state = before > 0
            store._write(before + 1)
        except OSError as error:
            store.close()
            raise StateError(f"state directory {directory} cannot be used: {error.strerror}") from error
        except StateError:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Give the directory back. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def raise_above(self, epoch: int) -> int:
        """Make the epoch larger than `epoch`, which a worker has seen, and return it. Idempotent.

        Raises OSError if it cannot be made durable; the epoch is then what it was.
        """
        with self._mutex:
            if self.epoch <= epoch:
                self._write(epoch + 1)
            return self.epoch

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            raise StateError(
                f"state directory {self._directory} is held by another manager{f' (pid {holder})' if holder else ''}: "
                "stop it, or give this one another --state-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)

    def _read(self) -> int:
        """The epoch of the life before; 0 if there was none."""
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

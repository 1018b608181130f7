"""The worker's incarnation: a number that grows with every start of the worker, kept in its state folder.

A process locks the folder for its lifetime, so the holder of the lock knows that its predecessor has ended. It proves that to the
manager with the predecessor's key, which is stored only there: a crashed worker may register again at once, while a second process
of the same name is refused as long as the first one runs.

Safety does not depend on it. A worker starts without a folder too: the manager then makes it wait until the predecessor's lease
ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import structlog

from kvpool.process.durable_file import write_durably

log = structlog.get_logger("kvpool.worker")

MAX_INCARNATION = (1 << 63) - 1
"""The wall clock in the year 2262. A larger one in the folder is damage."""
LOCK_WAIT_SECONDS = 10.0
"""Time for the predecessor to end: a worker that leaves finishes running requests first."""
_LOCK_POLL_SECONDS = 0.1
_KEY_BYTES = 16
_FILE = "incarnation"
_LOCK_FILE = "lock"
_FORMAT = re.compile(rb"kvpool worker (\d{1,19}) ([0-9a-f]{32}) ([0-9a-f]{8})\n")


class WorkerStateError(Exception):
    """The worker cannot start: another process has its state folder, or the given folder cannot be used."""


class Identity(NamedTuple):
    """The identity of this process, for Register."""

    incarnation: int
    process_key: bytes
    """Random key of this process."""
    predecessor_key: bytes
    """The process key of the predecessor, which has ended; empty if not known."""


class WorkerState:
    """The locked state folder of a worker, and the identity of this process. Created by `open`."""

    def __init__(self, identity: Identity, lock: int) -> None:
        self.identity = identity
        self._lock = lock

    @classmethod
    def open(
        cls,
        folder: Path | None,
        *,
        is_required: bool = False,
        wait_seconds: float = LOCK_WAIT_SECONDS,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> WorkerState:
        """Create the folder if it is missing, lock it for the lifetime of the process, and start the next incarnation.

        A damaged file is logged and replaced. A folder that cannot be used is logged and ignored, unless it `is_required`. `folder`
        None: the worker has none. `wall_clock` returns nanoseconds. Blocks. Raises WorkerStateError if another process holds the
        folder and does not end within `wait_seconds`.
        """
        if folder is None:
            return cls(next_identity(None, wall_clock()), -1)
        lock = -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _take_lock(lock, folder, wait_seconds)
            identity = next_identity(_read(folder), wall_clock())
            content = _encode(identity.incarnation, identity.process_key)
            write_durably(folder / _FILE, content, mode=0o600)
        except (OSError, WorkerStateError) as error:
            if lock >= 0:
                os.close(lock)
            if isinstance(error, WorkerStateError):
                raise
            problem = f"state folder {folder} cannot be used: {error.strerror or error}"
            if is_required:
                raise WorkerStateError(f"{problem}; give the worker another --state-dir") from error
            log.warning(
                problem,
                result="after a crash this worker can register only when the lease of the crashed process has ended",
                cure="name a folder with --state-dir",
            )
            return cls(next_identity(None, wall_clock()), -1)
        return cls(identity, lock)

    def close(self) -> None:
        """Release the folder. Idempotent; the end of the process does it too."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def next_identity(last: tuple[int, bytes] | None, now_ns: int) -> Identity:
    incarnation, key = last or (0, b"")
    return Identity(max(now_ns, incarnation + 1), secrets.token_bytes(_KEY_BYTES), key)


def _take_lock(lock: int, folder: Path, wait_seconds: float) -> None:
    """Raises WorkerStateError if another process holds it, OSError."""
    ends_at = time.monotonic() + wait_seconds
    is_logged = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            process = f"process {holder}" if holder.isdecimal() else "another process"
            if time.monotonic() >= ends_at:
                raise WorkerStateError(
                    f"{process} runs this worker already and holds its state folder {folder}: stop it, or give this worker another "
                    "--worker-id or --state-dir"
                ) from None
            if not is_logged:
                is_logged = True
                log.warning(f"{process} still runs this worker: waiting for its end", seconds=wait_seconds)
            time.sleep(_LOCK_POLL_SECONDS)
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d\n" % os.getpid(), 0)


def _encode(incarnation: int, key: bytes) -> bytes:
    body = b"kvpool worker %d %s" % (incarnation, key.hex().encode())
    return b"%s %08x\n" % (body, zlib.crc32(body))


def _read(folder: Path) -> tuple[int, bytes] | None:
    """Incarnation and key of the last process; None if there was none, or if the file is damaged."""
    path = folder / _FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    match = _FORMAT.fullmatch(data)
    if match is not None:
        incarnation, key = int(match[1]), bytes.fromhex(match[2].decode())
        if incarnation < MAX_INCARNATION and _encode(incarnation, key) == data:
            return incarnation, key
    log.warning("the last incarnation is unknown: the file is damaged", path=str(path))
    return None

"""The manager's disk: what was written and not fsynced may be lost or torn when the power goes, and fsync may lie.

Stands in for `os`, `open` and `fcntl` in cache_service/election/file.py and kvpool/process/durable_file.py, whose code runs
unchanged over it.
"""

from __future__ import annotations

import random
from typing import Any


class PowerLoss(BaseException):
    """The machine stops between two operations on its disk."""


class _Inode:
    def __init__(self) -> None:
        self.data = b""
        self.synced = b""
        self.is_synced = True


class Path:
    """A name on the disk, as far as FileEpochs and `write_durably` use pathlib."""

    def __init__(self, disk: Disk, name: str) -> None:
        self.disk = disk
        self.name = name

    def __str__(self) -> str:
        return f"disk:/{self.name}"

    @property
    def parent(self) -> Path:
        return Path(self.disk, "")

    def with_name(self, name: str) -> Path:
        return Path(self.disk, name)

    __truediv__ = with_name

    def mkdir(self, **_: Any) -> None:
        """There is one."""

    def read_bytes(self) -> bytes:
        """The content; FileNotFoundError."""
        self.disk.operation()
        inode = self.disk.visible.get(self.name)
        if inode is None:
            raise FileNotFoundError(self.name)
        return inode.data


class _File:
    def __init__(self, disk: Disk, inode: _Inode, number: int) -> None:
        self._disk, self._inode, self._number = disk, inode, number

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, data: bytes) -> None:
        self._disk.operation()
        self._inode.data += data
        self._inode.is_synced = False

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        return self._number


class Disk:
    """Names and contents, as they are seen and as they are after the power has gone."""

    O_RDWR = O_CREAT = O_CLOEXEC = O_RDONLY = O_DIRECTORY = 0
    LOCK_EX = LOCK_NB = 0

    def __init__(self, source: random.Random) -> None:
        self.visible: dict[str, _Inode] = {}
        self.lies = False
        """fsync does nothing."""
        self.operations_left: int | None = None
        """The power goes behind so many operations."""
        self.backups: list[bytes] = []
        """Contents of the state file that were durable once."""
        self._durable: dict[str, _Inode] = {}
        self._random = source
        self._open: list[_Inode | None] = []

    def operation(self) -> None:
        if self.operations_left is not None:
            self.operations_left -= 1
            if self.operations_left < 0:
                self.operations_left = None
                raise PowerLoss

    def lose_power(self) -> str:
        """What was not fsynced is lost, torn, or there all the same. Says what has come of it."""
        before = {name: inode.data for name, inode in self.visible.items()}
        if self._random.random() < 0.7:
            self.visible = dict(self._durable)
        for inode in self.visible.values():
            if not inode.is_synced:
                torn = inode.data[: self._random.randrange(len(inode.data) + 1)]
                inode.data = self._random.choice([torn, inode.synced])
            inode.synced, inode.is_synced = inode.data, True
        self._durable = dict(self.visible)
        self.operations_left = None
        now = {name: inode.data for name, inode in self.visible.items()}
        if now.get("epoch") == before.get("epoch"):
            return "kept"
        return "torn" if now.get("epoch") not in (None, *self.backups) else "lost"

    def restore(self, content: bytes | None) -> None:
        """The operator puts back what the state file held once, or removes it."""
        self.visible.pop("epoch", None)
        if content is not None:
            self.visible["epoch"] = inode = _Inode()
            inode.data = inode.synced = content
        self._durable = dict(self.visible)

    # -- as `os`, `fcntl` and `open`

    def open(self, path: Path, mode: int | str, *_: int, **__: Any) -> Any:
        """A number for a descriptor, or a file for writing."""
        self.operation()
        if mode == "wb":
            inode = self.visible[path.name] = _Inode()
            self._open.append(inode)
            return _File(self, inode, len(self._open) - 1)
        self._open.append(None)
        return len(self._open) - 1

    def fsync(self, number: int) -> None:
        """Of a file's content, or of the directory's names."""
        self.operation()
        if self.lies:
            return
        inode = self._open[number]
        if inode is not None:
            inode.synced, inode.is_synced = inode.data, True
            return
        self._durable = dict(self.visible)
        found = self.visible.get("epoch")
        if found is not None and found.is_synced:
            self.backups.append(found.data)

    def replace(self, old: Path, new: Path) -> None:
        self.operation()
        self.visible[new.name] = self.visible.pop(old.name)

    def _ignore(self, *_: Any) -> None:
        """There is one manager at a time, and the content of the lock's file matters to nobody."""

    close = flock = ftruncate = pwrite = _ignore

    def getpid(self) -> int:
        return 1

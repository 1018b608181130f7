"""The epoch only ever grows, whatever happens to the process or the disk."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kvpool.cache_service.election.epoch import MAX_EPOCH, StateError
from kvpool.cache_service.election.file import FileEpochs


def begin(directory: Path) -> int:
    with closing(FileEpochs.open(directory)) as store:
        return store.epoch


def test_every_life_has_a_larger_epoch(tmp_path: Path) -> None:
    assert [begin(tmp_path / "a" / "b") for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\0" * 26,
        b"kvpool epoch 1",
        b"kvpool epoch 12 83dcefb7\n",
        b"kvpool epoch 1 83dcefb7",
        b"1\n",
        b"kvpool epoch 01 83dcefb7\n",
        bytes(range(192, 256)),
    ],
)
def test_a_torn_or_foreign_file_is_an_error_and_never_a_smaller_epoch(tmp_path: Path, damage: bytes) -> None:
    assert begin(tmp_path) == 1
    (tmp_path / "epoch").write_bytes(damage)
    for _ in range(2):
        with pytest.raises(StateError, match="is damaged"):
            FileEpochs.open(tmp_path)
    assert (tmp_path / "epoch").read_bytes() == damage


async def test_raise_above_is_durable_and_never_lowers(tmp_path: Path) -> None:
    with closing(FileEpochs.open(tmp_path)) as store:
        assert [await store.raise_above(epoch) for epoch in (0, 9, 9, 3, 10)] == [1, 10, 10, 10, 11]
    assert begin(tmp_path) == 12


async def test_used_up_epochs_are_an_error_and_never_wrap(tmp_path: Path) -> None:
    with closing(FileEpochs.open(tmp_path)) as store:
        assert await store.raise_above(MAX_EPOCH - 1) == MAX_EPOCH
        with pytest.raises(StateError, match="used up"):
            await store.raise_above(MAX_EPOCH)
    with pytest.raises(StateError, match="used up"):
        FileEpochs.open(tmp_path)


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match=r"file/state cannot be used: Not a directory"):
        FileEpochs.open(tmp_path / "file" / "state")
    (tmp_path / "state" / "epoch.tmp").mkdir(parents=True)
    with pytest.raises(StateError, match=r"state cannot be used: Is a directory"):
        FileEpochs.open(tmp_path / "state")


async def test_an_epoch_is_not_raised_in_a_directory_that_was_given_back(tmp_path: Path) -> None:
    """The next manager may have begun a larger one there."""
    store = FileEpochs.open(tmp_path)
    for _ in range(2):
        store.close()
    assert begin(tmp_path) == 2
    with pytest.raises(StateError, match="was given back"):
        await store.raise_above(1)
    assert begin(tmp_path) == 3

"""The folder that workers share: several may write the same file at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvpool.worker_service.model.source.cache_dir import write_atomically


def test_writers_with_the_same_process_number_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Workers in containers that share a volume: each is process 7 of its own container. Threads share a number too."""
    path = tmp_path / "shared" / "record.json"

    def write(number: int) -> None:
        write_atomically(path, b"%d" % number * 1000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(400)))
    assert path.read_bytes() in {b"%d" % number * 1000 for number in range(400)}
    assert [file.name for file in path.parent.iterdir()] == [path.name]

"""Finds the GPUs of this machine without a library that the client lacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvpool.client.errors import InvalidRequest

VISIBLE_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str] | None:
    """Return the names of the GPUs that a process would see, as in CUDA_VISIBLE_DEVICES; None: unknown."""
    named = environment.get(VISIBLE_VARIABLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    files = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # Other ways to a GPU exist that leave no device file (WSL), so none found does not mean that there is none. And in a
    # container the files keep the host's numbers, while CUDA counts from 0.
    return [str(index) for index in range(len(files))] or None


def one_gpu_each(num_workers: int, environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the name of a GPU for each worker. Raises InvalidRequest if there are too few."""
    gpus = visible_gpus(environment, devices)
    if gpus is None:
        return [str(index) for index in range(num_workers)]  # a worker that finds none says so itself
    if len(gpus) < num_workers:
        raise InvalidRequest(
            f"{num_workers} workers with a GPU each need {num_workers} GPUs, there are {len(gpus)}"
            + (f" ({VISIBLE_VARIABLE}={environment[VISIBLE_VARIABLE]})" if VISIBLE_VARIABLE in environment else "")
            + ": start fewer workers, or let them share one with --device cuda:0 and --kv-cache-memory",
            reason="TOO_FEW_GPUS",
        )
    return gpus[:num_workers]

"""A tiny model's text over gRPC: manager and worker are processes, the client is in this one."""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Final

from tests.cluster.cluster import Cluster
from tests.cluster.truth import NUM_TOP, truths_of
from tests.tiny_models import TinyModel, make_tiny_model

from .backends import TOLERANCE
from .cases import AddRow
from .results import Row
from .setup import Setup

_BLOCK_SIZE: Final = 16
_NUM_BLOCKS: Final = 512
_WORKER: Final = "worker"
_LOG_CHARACTERS: Final = 2000


def compare_text(setup: Setup, add_row: AddRow, architecture: str) -> None:
    """Greedy float32 answers to all prompts at once, cold and warm, equal transformers' generate on the CPU."""
    with tempfile.TemporaryDirectory(dir=setup.folder) as folder:
        asyncio.run(_compare(setup, add_row, make_tiny_model(architecture, Path(folder, "model")), Path(folder)))


async def _compare(setup: Setup, add_row: AddRow, tiny: TinyModel, folder: Path) -> None:
    truths = truths_of(tiny)
    async with Cluster(folder) as cluster:
        await cluster.start_manager()
        worker = cluster.start_worker(
            _WORKER,
            model=tiny.path,
            device=setup.device,
            block_size=_BLOCK_SIZE,
            num_blocks=_NUM_BLOCKS,
            cache_dir=folder / "cache",
            runtime="torch",  # the native step is for CPUs
        )
        try:
            await cluster.until_registered(_WORKER)
            for temperature in ("cold", "warm"):
                answers = await cluster.all_at_once(tiny.prompts, max_tokens=tiny.num_new_tokens, logprobs=NUM_TOP)
                for truth, answer in zip(truths, answers, strict=True):
                    truth.check(answer, TOLERANCE)
                num_cached = sum(answer.num_cached_tokens for answer in answers)
                assert temperature == "cold" or num_cached > 0, "the second time nothing came out of the cache"
                add_row(
                    Row(
                        f"{tiny.architecture} {temperature}",
                        figures={"cached_tokens": num_cached, **_served(worker.log)},
                    )
                )
            await cluster.until_clean()
        except Exception as error:
            raise RuntimeError(f"{error}\nthe worker's log:\n{worker.log[-_LOG_CHARACTERS:]}") from error


def _served(log: str) -> dict[str, str]:
    """The backend that the worker selected, from its log."""
    found = re.search(r"attention: (\w+)", log)
    return {"backend": found[1] if found else "not known"}

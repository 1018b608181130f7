"""The cluster that most tests share: several tiny models behind one manager."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.cluster.cluster import Cluster
from tests.cluster.models import make_endless_model
from tests.cluster.truth import Truth, truths_of
from tests.tiny_models import TinyModel, make_tiny_model


@dataclass(frozen=True)
class TinyCluster:
    """One manager and four workers of block size 4, each with a model of its own, all in float32."""

    cluster: Cluster
    models: dict[str, TinyModel]

    ROOMY: ClassVar = "roomy"
    """A llama with a tokenizer of one token per character, over 1,024 blocks."""
    SMALL: ClassVar = "small"
    """Another model, over 3 blocks."""
    TIGHT: ClassVar = ("gpt2", "gemma2")
    """Under pressure: chunks of 7, and 20 blocks, which the longest sequence fits but never all of them."""

    def truths(self, name: str) -> list[Truth]:
        """What the worker must answer to its model's prompts."""
        return truths_of(self.models[name])


@asynccontextmanager
async def start_tiny_cluster(folder: Path) -> AsyncIterator[TinyCluster]:
    """Start it, and stop it in the end, when every law must hold."""
    roomy, small, tight = TinyCluster.ROOMY, TinyCluster.SMALL, TinyCluster.TIGHT
    models = {
        roomy: make_endless_model(folder / roomy, tokenizer=True),
        small: make_tiny_model("olmo2", folder / small),
    }
    models |= {name: make_tiny_model(name, folder / name) for name in tight}
    sizes: dict[str, dict[str, int]] = {roomy: {"num_blocks": 1025}, small: {"num_blocks": 4}}
    sizes |= {name: {"num_blocks": 21, "max_num_batched_tokens": 7, "max_num_seqs": 5} for name in tight}
    async with Cluster(folder) as cluster:
        await cluster.start(
            {name: {"model": models[name].path, "block_size": 4, **size} for name, size in sizes.items()}
        )
        yield TinyCluster(cluster, models)
        await cluster.until_clean()
